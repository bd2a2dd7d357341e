// One choice of a request on its way from tokens to what the client gets.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "launch/openai/generation_fields.h"
#include "launch/openai/logprobs_text.h"
#include "launch/openai/tool_calls.h"
#include "runtime/request.h"
#include "runtime/text_output.h"

namespace lockstep {

// Not thread-safe.
class ChoiceOutput {
 public:
  struct Options {
    ApiKind kind = ApiKind::kCompletion;
    bool calls_tools = false;
    bool single_tool_call = false;  // the first call ends the choice
    bool keeps_token_ids = false;
  };

  // `text`: none where there is no tokenizer.
  ChoiceOutput(const Options& options, std::optional<TextOutput> text);

  // The text that stands before the answer: an echo.
  void AddEcho(const std::string& text) { content_ += text; }
  LogprobsText& logprobs() { return logprobs_; }

  // When stopped() afterwards the choice has ended: the engine's further tokens are not its own.
  void Add(int32_t token, const std::optional<PositionLogprobs>& logprobs, TokenTexts& texts);
  bool stopped() const { return stopped_; }
  // The model's own end, or one of stop_token_ids: a token that was generated, but no text.
  void AddEndToken(int32_t token);
  // The last call, once: the text still held comes out.
  void End(FinishReason reason);
  bool ended() const { return finish_ != nullptr; }
  // OpenAI's word: "stop", "length", "tool_calls". Null before the end.
  const char* finish() const { return finish_; }
  FinishReason reason() const { return reason_; }

  int64_t num_tokens() const { return num_tokens_; }
  bool has_news() const { return !content_.empty() || !calls_.empty() || !token_ids_.empty(); }
  // What has come since it was taken last.
  std::string TakeContent() { return std::exchange(content_, {}); }
  std::vector<ToolCall> TakeCalls() { return std::exchange(calls_, {}); }
  std::vector<int32_t> TakeTokenIds() { return std::exchange(token_ids_, {}); }
  // Of all that is kept.
  size_t size_bytes() const { return content_.size() + logprobs_.size_bytes(); }

 private:
  void AddText(std::string text);
  void AddParsed(ToolCallParser::Output output);

  Options options_;
  std::optional<TextOutput> text_;
  std::optional<ToolCallParser> parser_;
  LogprobsText logprobs_;
  std::string content_;
  std::vector<ToolCall> calls_;
  std::vector<int32_t> token_ids_;
  int64_t num_tokens_ = 0;
  bool stopped_ = false;
  bool has_only_call_ = false;  // single_tool_call, and it is there
  FinishReason reason_ = FinishReason::kNone;
  const char* finish_ = nullptr;
};

}  // namespace lockstep
