#include "launch/batch/batch_line.h"

#include <algorithm>
#include <utility>

#include "launch/openai/json_text.h"
#include "launch/openai/request_body.h"
#include "runtime/core/json.h"
#include "runtime/request.h"

namespace lockstep {

namespace {

constexpr char kCompletions[] = "/v1/completions";
constexpr char kChats[] = "/v1/chat/completions";
constexpr uint64_t kSeedsPerLine = 1024;  // answer i of a line draws with the line's seed + i
static_assert(kSeedsPerLine >= static_cast<uint64_t>(kMaxChoices));

const OrderedJson* Find(const OrderedJson& object, const char* key) {
  const auto it = object.find(key);
  return it == object.end() || it->is_null() ? nullptr : &*it;
}

absl::Status TakeCustomId(OrderedJson& line, BatchLine* result) {
  const OrderedJson* const id = Find(line, "custom_id");
  if (id != nullptr && !id->is_string()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("custom_id must be a string, found %s", QuotedJson(*id)));
  }
  if (id != nullptr) result->custom_id = id->get<std::string>();
  line.erase("custom_id");
  return absl::OkStatus();
}

// The body of a line in OpenAI's form.
absl::StatusOr<OrderedJson> TakeBody(OrderedJson& line, std::string* path) {
  const OrderedJson* const method = Find(line, "method");
  if (method != nullptr && *method != "POST") {
    return absl::InvalidArgumentError(
        absl::StrFormat("method must be \"POST\", found %s", QuotedJson(*method)));
  }
  const OrderedJson* const url = Find(line, "url");
  if (url == nullptr) return absl::InvalidArgumentError("url is missing");
  if (*url != kCompletions && *url != kChats) {
    return absl::InvalidArgumentError(
        absl::StrFormat("url must be %s or %s, found %s", kCompletions, kChats, QuotedJson(*url)));
  }
  *path = url->get<std::string>();
  const OrderedJson* const body = Find(line, "body");
  if (body == nullptr || !body->is_object()) {
    return absl::InvalidArgumentError(body == nullptr ? "body is missing"
                                                      : "body must be an object");
  }
  return std::move(line["body"]);
}

absl::StatusOr<OrderedJson> BodyOf(OrderedJson line, std::string* path) {
  if (line.contains("body") || line.contains("url") || line.contains("method")) {
    return TakeBody(line, path);
  }
  const bool prompt = Find(line, "prompt") != nullptr;
  if (prompt == (Find(line, "messages") != nullptr)) {
    return absl::InvalidArgumentError(
        prompt ? "prompt and messages exclude each other"
               : "the line has neither url and body nor prompt nor messages");
  }
  *path = prompt ? kCompletions : kChats;
  return line;
}

int64_t CountChoices(const OrderedJson& body) {
  const OrderedJson* const n = Find(body, "n");
  const OrderedJson* const prompt = Find(body, "prompt");
  int64_t choices = 1;
  if (n != nullptr && n->is_number_integer()) {
    choices = std::clamp<int64_t>(n->get<int64_t>(), 1, kMaxChoices);
  }
  if (prompt != nullptr && prompt->is_array() && !prompt->empty() && !prompt->front().is_number()) {
    choices *= std::ssize(*prompt);
  }
  return std::min<int64_t>(choices, kMaxChoices);  // the API refuses more
}

void AddDefaults(int64_t number, const LineDefaults& defaults, OrderedJson* body) {
  if (defaults.max_tokens.has_value() && Find(*body, "max_tokens") == nullptr &&
      Find(*body, "max_completion_tokens") == nullptr) {
    (*body)["max_tokens"] = *defaults.max_tokens;
  }
  if (defaults.seed.has_value() && Find(*body, "seed") == nullptr) {
    (*body)["seed"] = *defaults.seed + kSeedsPerLine * static_cast<uint64_t>(number);
  }
}

absl::Status Parse(std::string_view text, int64_t number, const LineDefaults& defaults,
                   BatchLine* result) {
  LOCKSTEP_ASSIGN_OR_RETURN(OrderedJson line, ParseOrderedObject(text, "the line"));
  LOCKSTEP_RETURN_IF_ERROR(TakeCustomId(line, result));
  LOCKSTEP_ASSIGN_OR_RETURN(OrderedJson body, BodyOf(std::move(line), &result->path));
  const OrderedJson* const stream = Find(body, "stream");
  if (stream != nullptr && *stream == true) {
    return absl::InvalidArgumentError("stream is true: a batch job has no streams");
  }
  AddDefaults(number, defaults, &body);
  result->num_choices = CountChoices(body);
  result->body = DumpJson(body);
  return absl::OkStatus();
}

}  // namespace

BatchLine ParseBatchLine(std::string_view text, int64_t number, const LineDefaults& defaults) {
  BatchLine line;
  if (const absl::Status status = Parse(text, number, defaults, &line); !status.ok()) {
    line.error = BadRequest(std::string(status.message()));
    line.error->code = "invalid_line";
  }
  return line;
}

}  // namespace lockstep
