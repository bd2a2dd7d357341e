#include "launch/openai/tool_calls.h"

#include <gtest/gtest.h>

namespace lockstep {
namespace {

struct Parsed {
  std::string content;
  std::vector<std::string> calls;  // NAME ARGUMENTS

  bool operator==(const Parsed&) const = default;
};

void Append(const ToolCallParser::Output& output, Parsed* parsed) {
  parsed->content += output.content;
  for (const ToolCall& call : output.calls) {
    parsed->calls.push_back(call.name + " " + call.arguments);
  }
}

Parsed Parse(const std::string& text, size_t piece_bytes) {
  ToolCallParser parser;
  Parsed parsed;
  for (size_t at = 0; at < text.size(); at += piece_bytes) {
    Append(parser.Push(std::string_view(text).substr(at, piece_bytes)), &parsed);
  }
  Append(parser.Finish(), &parsed);
  return parsed;
}

const char kCall[] = "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": 1}}\n</tool_call>";

TEST(ToolCallsTest, DoNotDependOnHowTheTextWasCut) {
  const std::string call = kCall;
  const std::pair<std::string, Parsed> cases[] = {
      {"", {"", {}}},
      {"no call \n", {"no call \n", {}}},
      {call, {"", {"f {\"x\":1}"}}},
      {"Well.\n\n" + call + "\n", {"Well.", {"f {\"x\":1}"}}},
      {call + "\n" + call, {"", {"f {\"x\":1}", "f {\"x\":1}"}}},
      {"a " + call + " b  c ", {"ab  c ", {"f {\"x\":1}"}}},
      {"a < b <tool_ <tool_cal", {"a < b <tool_ <tool_cal", {}}},
      // Broken ones are text.
      {"<tool_call>{\"name\": }</tool_call> x", {"<tool_call>{\"name\": }</tool_call> x", {}}},
      {"<tool_call>[1]</tool_call>", {"<tool_call>[1]</tool_call>", {}}},
      {"<tool_call>{\"name\": 3}</tool_call>", {"<tool_call>{\"name\": 3}</tool_call>", {}}},
      {"<tool_call>{\"name\": \"f\", \"arg", {"<tool_call>{\"name\": \"f\", \"arg", {}}},
      // The end tag may be missing, and arguments be a text or go by another name.
      {"<tool_call>{\"name\": \"f\"}", {"", {"f {}"}}},
      {"<tool_call>{\"name\": \"f\", \"arguments\": \"{}\"}</tool_call>", {"", {"f {}"}}},
      {"<tool_call>{\"name\": \"f\", \"parameters\": {\"b\": 1, \"a\": \"é\"}}</tool_call>",
       {"", {"f {\"b\":1,\"a\":\"é\"}"}}},
  };
  for (const auto& [text, expected] : cases) {
    for (size_t piece = 1; piece <= text.size() + 1; ++piece) {
      EXPECT_EQ(Parse(text, piece), expected) << text << " in pieces of " << piece;
    }
  }
}

TEST(ToolCallsTest, DeepJsonIsText) {
  const std::string deep =
      "<tool_call>{\"name\": \"f\", \"arguments\": " + std::string(100000, '[') + "</tool_call>";
  EXPECT_EQ(Parse(deep, 1 << 20), (Parsed{deep, {}}));
}

}  // namespace
}  // namespace lockstep
