#include "launch/openai/tool_calls.h"

#include <algorithm>
#include <optional>
#include <utility>

namespace lockstep {

namespace {

constexpr std::string_view kBlanks = " \t\r\n";

// Length of the longest beginning of `tag` that ends `text`.
size_t PartialTag(std::string_view text, std::string_view tag) {
  size_t length = std::min(text.size(), tag.size() - 1);
  while (length > 0 && text.substr(text.size() - length) != tag.substr(0, length)) --length;
  return length;
}

std::optional<ToolCall> ParseCall(std::string_view text) {
  auto json = ParseOrderedJson(text, "tool call");
  if (!json.ok() || !json->is_object()) return std::nullopt;
  const auto name = json->find("name");
  if (name == json->end() || !name->is_string() || name->get_ref<const std::string&>().empty()) {
    return std::nullopt;
  }
  ToolCall call{name->get<std::string>(), "{}"};
  auto arguments = json->find("arguments");
  if (arguments == json->end()) arguments = json->find("parameters");
  if (arguments == json->end() || arguments->is_null()) return call;
  if (arguments->is_object()) {
    call.arguments = DumpJson(*arguments);
  } else if (arguments->is_string()) {
    call.arguments = arguments->get<std::string>();
  } else {
    return std::nullopt;
  }
  return call;
}

}  // namespace

ToolCallParser::Output ToolCallParser::Push(std::string_view piece) {
  Output output;
  held_ += piece;
  Step(/*ended=*/false, output);
  return output;
}

ToolCallParser::Output ToolCallParser::Finish() {
  Output output;
  Step(/*ended=*/true, output);
  if (!behind_call_) output.content += blanks_;
  blanks_.clear();
  return output;
}

void ToolCallParser::Step(bool ended, Output& output) {
  while (in_call_ ? StepCall(ended, output) : StepContent(ended, output)) {
  }
}

// True when a call begins.
bool ToolCallParser::StepContent(bool ended, Output& output) {
  const size_t begin = held_.find(kToolCallBegin);
  const size_t end = begin != std::string::npos
                         ? begin
                         : held_.size() - (ended ? 0 : PartialTag(held_, kToolCallBegin));
  Emit(std::string_view(held_).substr(0, end), output);
  if (begin == std::string::npos) {
    held_.erase(0, end);
    return false;
  }
  held_.erase(0, begin + kToolCallBegin.size());
  in_call_ = true;
  return true;
}

// True when the call has ended and more may follow.
bool ToolCallParser::StepCall(bool ended, Output& output) {
  const size_t end = held_.find(kToolCallEnd, searched_);
  if (end == std::string::npos && !ended) {
    searched_ = held_.size() - std::min(held_.size(), kToolCallEnd.size() - 1);
    return false;
  }
  searched_ = 0;
  const std::string_view text = std::string_view(held_).substr(0, end);
  if (std::optional<ToolCall> call = ParseCall(text); call.has_value()) {
    blanks_.clear();
    behind_call_ = true;
    output.calls.push_back(*std::move(call));
    ++num_calls_;
  } else {
    Emit(kToolCallBegin, output);
    Emit(text, output);
    if (end != std::string::npos) Emit(kToolCallEnd, output);
  }
  held_.erase(0, end == std::string::npos ? held_.size() : end + kToolCallEnd.size());
  in_call_ = false;
  return !held_.empty();
}

// Content, but for the whitespace at its end, which waits for what follows.
void ToolCallParser::Emit(std::string_view content, Output& output) {
  const size_t last = content.find_last_not_of(kBlanks);
  if (last == std::string_view::npos) {
    blanks_ += content;
    return;
  }
  const size_t first = behind_call_ ? content.find_first_not_of(kBlanks) : 0;
  if (!behind_call_) output.content += blanks_;
  behind_call_ = false;
  output.content += content.substr(first, last + 1 - first);
  blanks_ = content.substr(last + 1);
}

}  // namespace lockstep
