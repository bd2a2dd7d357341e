// What a request asks about: prompts of /v1/completions, messages and tools of
// /v1/chat/completions.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "runtime/core/json.h"
#include "runtime/core/status.h"

namespace lockstep {

// Text to be tokenised, or ids.
struct PromptSource {
  bool is_text = false;
  std::string text;
  std::vector<int32_t> ids;
};

// body["prompt"]: a string, a list of strings, a list of ids or a list of such lists, at most
// `max_prompts`. Takes the texts out of `body`. Errors begin with the field.
absl::StatusOr<std::vector<PromptSource>> ReadPrompts(Json& body, int64_t max_prompts);

// A list of ids in [0, 2^31); `name` leads the message.
absl::StatusOr<std::vector<int32_t>> ReadTokenIds(const Json& value, const std::string& name);

struct ChatPrompt {
  OrderedJson input;              // for ChatFormat::Render
  bool calls_tools = false;       // tool calls are looked for in the answer
  bool single_tool_call = false;  // parallel_tool_calls: false
};

// messages, tools, tool_choice, parallel_tool_calls, documents, add_generation_prompt and
// chat_template_kwargs, in the form that templates expect: content parts joined to one text,
// developer messages as system ones, arguments of tool calls as objects. `body` keeps the client's
// order of keys. Errors begin with the field.
absl::StatusOr<ChatPrompt> ReadChat(OrderedJson& body);

}  // namespace lockstep
