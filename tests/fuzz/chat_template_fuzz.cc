// Any bytes as a chat template, rendered over a fixed conversation.
#include <string_view>

#include "model/chat/chat_template.h"

namespace {

constexpr char kInput[] = R"({
  "messages": [
    {"role": "system", "content": "  Be brief.\n"},
    {"role": "user", "content": [{"type": "text", "text": "straße 🦙"}, {"type": "image"}]},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes", "tool_calls": [
      {"id": "c1", "type": "function",
       "function": {"name": "f", "arguments": {"city": "Köln", "days": 2.5}}}]},
    {"role": "tool", "content": "{\"t\": 7.50}", "tool_call_id": "c1"}],
  "tools": [{"type": "function", "function": {"name": "f", "parameters": {"required": ["city"]}}}],
  "documents": null, "add_generation_prompt": true, "bos_token": "<s>", "eos_token": "</s>",
  "n": -7, "f": 1e20, "words": ["pear", "Apple", "fig"], "nums": [3, 1, 2.5, 10, 1]})";

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const lockstep::OrderedJson input = *lockstep::ParseOrderedJson(kInput, "input");
  lockstep::RenderOptions options;
  options.limits = {.max_steps = 20'000,
                    .max_allocated_bytes = 1 << 20,
                    .max_output_bytes = 1 << 18,
                    .max_recursion = 100};
  options.now = std::chrono::system_clock::time_point();
  const auto chat_template = lockstep::ChatTemplate::Parse(
      std::string_view(reinterpret_cast<const char*>(data), size), "template");
  if (chat_template.ok()) (void)(*chat_template)->Render(input, options);
  return 0;
}
