// Splits a template into text and the tokens of its tags, with the white-space rules of trim_blocks
// and lstrip_blocks.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "model/chat/jinja_value.h"

namespace lockstep {

enum class JinjaTokenType {
  kText,
  kOutputBegin,  // {{
  kOutputEnd,
  kBlockBegin,  // {%
  kBlockEnd,
  kName,
  kString,
  kInt,
  kFloat,
  kOperator,
  kEnd,
};

struct JinjaToken {
  JinjaTokenType type = JinjaTokenType::kEnd;
  std::string text;  // text, name, operator as written, or the string with its escapes resolved
  JinjaInt int_value = 0;
  double float_value = 0;
  int line = 1;
};

// A syntax error: `line` counts from 1.
struct JinjaSyntaxError {
  absl::StatusCode code = absl::StatusCode::kInvalidArgument;
  int line = 1;
  std::string message;
};

// Ends with a kEnd token. Throws JinjaSyntaxError.
std::vector<JinjaToken> TokenizeJinja(std::string_view source);

// How a token is called in messages.
std::string DescribeToken(const JinjaToken& token);

}  // namespace lockstep
