// Responses as OpenAI spells them: whole objects and the events of a stream.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "launch/openai/generation_fields.h"
#include "launch/openai/tool_calls.h"

namespace lockstep {

struct TokenUsage {
  int64_t prompt_tokens = 0;
  int64_t completion_tokens = 0;
};

// What a response says of one choice: all of it, or what has come since the last event.
struct ChoiceText {
  int64_t index = 0;
  std::string content;
  std::vector<ToolCall> calls;
  int64_t first_call = 0;         // number of the first of `calls` among the choice's
  std::string logprobs = "null";  // JSON
  const char* finish = nullptr;   // null: it goes on
  std::string prompt_logprobs{};  // JSON; empty: not asked for
  // With return_token_ids.
  std::vector<int32_t> token_ids{};
  std::vector<int32_t> prompt_token_ids{};
};

// Of one request. What does not change between its events is made once.
class ResponseText {
 public:
  // `model`: as the client called it. `fingerprint` may be empty.
  ResponseText(const GenerationFields& fields, const std::string& model,
               const std::string& fingerprint, int64_t created);

  const std::string& id() const { return id_; }

  // Events, appended to `out`. `usage`: so far, for continuous_usage.
  void AppendRole(int64_t index, const TokenUsage& usage, std::string* out) const;
  void AppendChunk(const ChoiceText& choice, const TokenUsage& usage, std::string* out) const;
  // The event of include_usage, then [DONE].
  void AppendEnd(const TokenUsage& usage, std::string* out) const;

  // A response that is no stream, choice by choice.
  std::string Head() const;
  void AppendChoice(const ChoiceText& choice, std::string* out) const;
  void AppendTail(const TokenUsage& usage, std::string* out) const;

 private:
  void AppendEventTail(const TokenUsage& usage, std::string* out) const;
  void AppendTokenIds(const ChoiceText& choice, std::string* out) const;

  ApiKind kind_;
  bool include_usage_;
  bool continuous_usage_;
  bool return_token_ids_;
  std::string id_;
  std::string event_head_;  // up to the list of choices
  std::string whole_head_;
};

// An error in a stream that has begun, and its end.
std::string ErrorEvent(const std::string& error_json);

// `num_digits` random hexadecimal digits.
std::string RandomHex(int num_digits);

}  // namespace lockstep
