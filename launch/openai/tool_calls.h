// Tool calls in a model's answer, in the form that Hermes and Qwen models are trained on:
//
//   <tool_call>
//   {"name": "weather", "arguments": {"city": "Paris"}}
//   </tool_call>
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "runtime/core/json.h"

namespace lockstep {

inline constexpr std::string_view kToolCallBegin = "<tool_call>";
inline constexpr std::string_view kToolCallEnd = "</tool_call>";

struct ToolCall {
  std::string name;
  std::string arguments;  // JSON
};

// Splits a text that comes in pieces into content and calls; what comes out does not depend on how
// the text was cut. Whitespace around calls is dropped. A call that is no JSON object of name and
// arguments is content, tags and all. Not thread-safe.
class ToolCallParser {
 public:
  struct Output {
    std::string content;
    std::vector<ToolCall> calls;
  };

  Output Push(std::string_view piece);
  // The text has ended. A call whose end tag is missing counts when it is whole otherwise.
  Output Finish();

  int num_calls() const { return num_calls_; }

 private:
  void Step(bool ended, Output& output);
  bool StepContent(bool ended, Output& output);
  bool StepCall(bool ended, Output& output);
  void Emit(std::string_view content, Output& output);

  std::string held_;     // not decided yet; inside a call, what follows the begin tag
  size_t searched_ = 0;  // of it, without an end tag in it
  std::string blanks_;   // whitespace that a call before or behind it swallows
  bool in_call_ = false;
  bool behind_call_ = false;  // no content since the last call
  int num_calls_ = 0;
};

}  // namespace lockstep
