#include "launch/openai/choice_output.h"

namespace lockstep {

ChoiceOutput::ChoiceOutput(const Options& options, std::optional<TextOutput> text)
    : options_(options), text_(std::move(text)), logprobs_(options.kind) {
  if (options_.calls_tools) parser_.emplace();
}

void ChoiceOutput::Add(int32_t token, const std::optional<PositionLogprobs>& logprobs,
                       TokenTexts& texts) {
  ++num_tokens_;
  if (options_.keeps_token_ids) token_ids_.push_back(token);
  if (logprobs.has_value()) logprobs_.Add(*logprobs, texts);
  AddText(text_.has_value() ? text_->Push(token) : IdAsText(token));
  if (text_.has_value() && text_->stopped()) stopped_ = true;
}

void ChoiceOutput::AddEndToken(int32_t token) {
  ++num_tokens_;
  if (options_.keeps_token_ids) token_ids_.push_back(token);
}

void ChoiceOutput::AddText(std::string text) {
  if (parser_.has_value()) {
    AddParsed(parser_->Push(text));
  } else {
    content_ += text;
  }
}

void ChoiceOutput::AddParsed(ToolCallParser::Output output) {
  // Behind the only call that is wanted, nothing is.
  if (has_only_call_) return;
  content_ += output.content;
  for (ToolCall& call : output.calls) {
    calls_.push_back(std::move(call));
    if (!options_.single_tool_call) continue;
    has_only_call_ = stopped_ = true;
    return;
  }
}

void ChoiceOutput::End(FinishReason reason) {
  reason_ = reason;
  if (text_.has_value() && !stopped_) {
    AddText(text_->Finish());
    if (text_->stopped()) reason_ = FinishReason::kStop;
  }
  if (parser_.has_value()) AddParsed(parser_->Finish());
  const bool calls = parser_.has_value() && parser_->num_calls() > 0;
  finish_ = reason_ == FinishReason::kLength ? "length" : calls ? "tool_calls" : "stop";
}

}  // namespace lockstep
