#include "launch/openai/response_text.h"

#include <random>

#include "absl/strings/str_join.h"
#include "launch/openai/json_text.h"

namespace lockstep {

namespace {

constexpr char kDone[] = "data: [DONE]\n\n";

void AppendUsage(const TokenUsage& usage, std::string* out) {
  absl::StrAppend(out, "{\"prompt_tokens\":", usage.prompt_tokens,
                  ",\"total_tokens\":", usage.prompt_tokens + usage.completion_tokens,
                  ",\"completion_tokens\":", usage.completion_tokens, "}");
}

// Everything in front of the list of choices.
std::string MakeHead(const std::string& id, const char* object, int64_t created,
                     const std::string& model, const std::string& fingerprint) {
  std::string head = "{\"id\":";
  AppendJsonString(id, &head);
  absl::StrAppend(&head, ",\"object\":\"", object, "\",\"created\":", created, ",\"model\":");
  AppendJsonString(model, &head);
  head += ",\"system_fingerprint\":";
  if (fingerprint.empty()) {
    head += "null";
  } else {
    AppendJsonString(fingerprint, &head);
  }
  return head + ",\"choices\":[";
}

void AppendFinish(const char* finish, std::string* out) {
  if (finish == nullptr) {
    *out += ",\"finish_reason\":null";
  } else {
    absl::StrAppend(out, ",\"finish_reason\":\"", finish, "\"");
  }
}

// In a stream each call has its number.
void AppendCalls(const ChoiceText& choice, bool streams, std::string* out) {
  *out += "\"tool_calls\":[";
  for (size_t i = 0; i < choice.calls.size(); ++i) {
    if (i > 0) out->push_back(',');
    out->push_back('{');
    if (streams) {
      absl::StrAppend(out, "\"index\":", choice.first_call + static_cast<int64_t>(i), ",");
    }
    absl::StrAppend(out, "\"id\":\"call_", RandomHex(24), "\",\"type\":\"function\",");
    *out += "\"function\":{\"name\":";
    AppendJsonString(choice.calls[i].name, out);
    *out += ",\"arguments\":";
    AppendJsonString(choice.calls[i].arguments, out);
    *out += "}}";
  }
  out->push_back(']');
}

void AppendDelta(const ChoiceText& choice, std::string* out) {
  *out += ",\"delta\":{";
  if (!choice.content.empty()) {
    *out += "\"content\":";
    AppendJsonString(choice.content, out);
  }
  if (!choice.calls.empty()) {
    if (!choice.content.empty()) out->push_back(',');
    AppendCalls(choice, /*streams=*/true, out);
  }
  out->push_back('}');
}

void AppendMessage(const ChoiceText& choice, std::string* out) {
  *out += ",\"message\":{\"role\":\"assistant\",\"content\":";
  if (choice.content.empty() && !choice.calls.empty()) {
    *out += "null";
  } else {
    AppendJsonString(choice.content, out);
  }
  *out += ",\"refusal\":null";
  if (!choice.calls.empty()) {
    out->push_back(',');
    AppendCalls(choice, /*streams=*/false, out);
  }
  out->push_back('}');
}

}  // namespace

std::string RandomHex(int num_digits) {
  thread_local std::mt19937_64 random{std::random_device{}()};
  std::string hex;
  while (static_cast<int>(hex.size()) < num_digits) absl::StrAppendFormat(&hex, "%016x", random());
  hex.resize(static_cast<size_t>(num_digits));
  return hex;
}

ResponseText::ResponseText(const GenerationFields& fields, const std::string& model,
                           const std::string& fingerprint, int64_t created)
    : kind_(fields.kind),
      include_usage_(fields.include_usage),
      continuous_usage_(fields.continuous_usage),
      return_token_ids_(fields.return_token_ids) {
  const bool chat = kind_ == ApiKind::kChat;
  id_ = (chat ? "chatcmpl-" : "cmpl-") + RandomHex(24);
  const char* const whole = chat ? "chat.completion" : "text_completion";
  const char* const event = chat ? "chat.completion.chunk" : "text_completion";
  whole_head_ = MakeHead(id_, whole, created, model, fingerprint);
  event_head_ = "data: " + MakeHead(id_, event, created, model, fingerprint);
}

void ResponseText::AppendEventTail(const TokenUsage& usage, std::string* out) const {
  out->push_back(']');
  if (continuous_usage_) {
    *out += ",\"usage\":";
    AppendUsage(usage, out);
  } else if (include_usage_) {
    *out += ",\"usage\":null";
  }
  *out += "}\n\n";
}

void ResponseText::AppendTokenIds(const ChoiceText& choice, std::string* out) const {
  if (!return_token_ids_) return;
  absl::StrAppend(out, ",\"token_ids\":[", absl::StrJoin(choice.token_ids, ","), "]");
  if (choice.prompt_token_ids.empty()) return;
  absl::StrAppend(out, ",\"prompt_token_ids\":[", absl::StrJoin(choice.prompt_token_ids, ","), "]");
}

void ResponseText::AppendRole(int64_t index, const TokenUsage& usage, std::string* out) const {
  absl::StrAppend(out, event_head_, "{\"index\":", index,
                  ",\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"logprobs\":null,"
                  "\"finish_reason\":null}");
  AppendEventTail(usage, out);
}

void ResponseText::AppendChunk(const ChoiceText& choice, const TokenUsage& usage,
                               std::string* out) const {
  absl::StrAppend(out, event_head_, "{\"index\":", choice.index);
  if (kind_ == ApiKind::kChat) {
    AppendDelta(choice, out);
  } else {
    *out += ",\"text\":";
    AppendJsonString(choice.content, out);
  }
  *out += ",\"logprobs\":";
  *out += choice.logprobs;
  AppendFinish(choice.finish, out);
  AppendTokenIds(choice, out);
  out->push_back('}');
  AppendEventTail(usage, out);
}

void ResponseText::AppendEnd(const TokenUsage& usage, std::string* out) const {
  if (include_usage_) {
    absl::StrAppend(out, event_head_, "],\"usage\":");
    AppendUsage(usage, out);
    *out += "}\n\n";
  }
  *out += kDone;
}

std::string ResponseText::Head() const { return whole_head_; }

void ResponseText::AppendChoice(const ChoiceText& choice, std::string* out) const {
  if (out->back() == '}') out->push_back(',');
  absl::StrAppend(out, "{\"index\":", choice.index);
  if (kind_ == ApiKind::kChat) {
    AppendMessage(choice, out);
  } else {
    *out += ",\"text\":";
    AppendJsonString(choice.content, out);
  }
  *out += ",\"logprobs\":";
  *out += choice.logprobs;
  AppendFinish(choice.finish, out);
  if (!choice.prompt_logprobs.empty()) {
    *out += ",\"prompt_logprobs\":";
    *out += choice.prompt_logprobs;
  }
  AppendTokenIds(choice, out);
  out->push_back('}');
}

void ResponseText::AppendTail(const TokenUsage& usage, std::string* out) const {
  *out += "],\"usage\":";
  AppendUsage(usage, out);
  out->push_back('}');
}

std::string ErrorEvent(const std::string& error_json) {
  return "data: " + error_json + "\n\n" + kDone;
}

}  // namespace lockstep
