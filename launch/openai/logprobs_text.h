// The log probabilities of one choice as JSON, in either API's form, as they come.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "launch/openai/generation_fields.h"
#include "launch/openai/token_texts.h"
#include "runtime/request.h"

namespace lockstep {

// Completions: {"tokens", "token_logprobs", "top_logprobs", "text_offset"}, offsets in characters
// of the text from its start. Chats: {"content": [{"token", "logprob", "bytes", "top_logprobs"}],
// "refusal": null}. Not thread-safe.
class LogprobsText {
 public:
  explicit LogprobsText(ApiKind kind) : kind_(kind) {}

  // The prompt that an echo puts in front. `logprobs`: from the second token on.
  void AddPrompt(std::span<const int32_t> ids, std::span<const PositionLogprobs> logprobs,
                 TokenTexts& texts);
  void Add(const PositionLogprobs& position, TokenTexts& texts);

  bool empty() const { return content_.empty(); }
  size_t size_bytes() const {
    return content_.size() + logprobs_.size() + top_.size() + offsets_.size();
  }
  // What was added since the last Take, as an object; "null" when there is nothing.
  std::string Take();

 private:
  void AddCompletion(const TokenText& text, const PositionLogprobs* position, TokenTexts& texts);
  void AddChat(const TokenText& text, const PositionLogprobs& position, TokenTexts& texts);

  ApiKind kind_;
  bool is_first_ = true;
  int64_t offset_ = 0;
  // Lists without their brackets. Completions: the tokens; chats: all there is.
  std::string content_;
  std::string logprobs_;
  std::string top_;
  std::string offsets_;
};

// Of the whole prompt: [null, {"ID": {"logprob", "decoded_token"}, ...}, ...].
std::string PromptLogprobsJson(std::span<const PositionLogprobs> logprobs, TokenTexts& texts);

}  // namespace lockstep
