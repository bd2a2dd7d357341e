#include "launch/openai/api_error.h"

#include <algorithm>
#include <string_view>

#include "launch/openai/api_server.h"
#include "launch/openai/json_text.h"
#include "model/tokenizer/utf8.h"

namespace lockstep {

namespace {

// Some quote what the client sent.
constexpr size_t kMaxMessageBytes = 2000;

const char* TypeOf(int http_status) {
  switch (http_status) {
    case 401:
      return "authentication_error";
    case 404:
      return "not_found_error";
    case 408:
    case 504:
      return "timeout_error";
    case 429:
      return "rate_limit_error";
    case 503:
      return "service_unavailable_error";
    default:
      return http_status < 500 ? "invalid_request_error" : "server_error";
  }
}

void AppendOrNull(const std::string& text, std::string* out) {
  if (text.empty()) {
    *out += "null";
  } else {
    AppendJsonString(text, out);
  }
}

// "messages[2].role must be ..." -> "messages[2].role"; empty when the message starts with words.
std::string LeadingField(std::string_view message) {
  const auto is_field = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_' || c == '.' || c == '[' ||
           c == ']';
  };
  const auto end = std::find_if_not(message.begin(), message.end(), is_field);
  std::string field(message.begin(), end);
  // Field names that are English words, too, stand before these.
  const std::string_view rest = message.substr(field.size());
  for (const std::string_view verb : {" is ", " must ", " has ", ": ", " names ", " and "}) {
    if (!field.empty() && rest.substr(0, verb.size()) == verb) return field;
  }
  return "";
}

}  // namespace

std::string ErrorJson(const ApiError& error) {
  std::string json = "{\"error\":{\"message\":";
  std::string message;
  AppendLossyUtf8(std::string_view(error.message).substr(0, kMaxMessageBytes), /*final=*/true,
                  &message);
  AppendJsonString(message, &json);
  json += ",\"type\":";
  AppendJsonString(TypeOf(error.http_status), &json);
  json += ",\"param\":";
  AppendOrNull(error.param, &json);
  json += ",\"code\":";
  AppendOrNull(error.code, &json);
  return json + "}}";
}

void RespondError(HttpExchange& exchange, const ApiError& error) {
  HttpHeaders headers = error.headers;
  headers.emplace_back("Content-Type", "application/json");
  exchange.Respond(error.http_status, headers, ErrorJson(error));
}

ApiError BadRequest(const std::string& message) {
  return {.http_status = 400, .message = message, .param = LeadingField(message)};
}

ApiError Overloaded(int http_status, const std::string& message) {
  return {.http_status = http_status,
          .message = message,
          .code = http_status == 429 ? "queue_full" : "unavailable",
          .headers = {{"Retry-After", http_status == 429 ? "1" : "5"}}};
}

ApiError ErrorOf(const absl::Status& status) {
  const std::string message(status.message());
  switch (status.code()) {
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kUnimplemented:
    case absl::StatusCode::kResourceExhausted:
    case absl::StatusCode::kAborted:
      return BadRequest(message);
    case absl::StatusCode::kOutOfRange:
      return {.http_status = 400,
              .message = message,
              .param = "prompt",
              .code = "context_length_exceeded"};
    case absl::StatusCode::kNotFound:
      return {.http_status = 404, .message = message, .param = "model", .code = "model_not_found"};
    case absl::StatusCode::kFailedPrecondition:
      return Overloaded(503, message);
    default:
      return {.http_status = 500, .message = message};
  }
}

std::string OpenAiErrorBody(int status, const std::string& message) {
  return ErrorJson({.http_status = status, .message = message});
}

}  // namespace lockstep
