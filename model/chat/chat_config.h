// What a model's files say about chatting: the template and the special tokens that templates
// print.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "model/chat/chat_template.h"
#include "runtime/core/json.h"
#include "runtime/core/status.h"

namespace lockstep {

// Plain data: a Hugging Face folder fills it (LoadChatConfig), a GGUF file's metadata can, too.
struct ChatConfig {
  std::string where;          // names the source of the template in messages
  std::string chat_template;  // Jinja
  std::string tool_template;  // used instead when tools are given; empty: chat_template serves
  // The special tokens as text under the names that templates use: {"bos_token", "<s>"}, ... Only
  // those that the model has.
  std::vector<std::pair<std::string, std::string>> special_tokens;
};

// Reads chat_template.jinja, which wins, or the key chat_template of tokenizer_config.json: a
// string, or a list of {name, template} of which "default" is taken, and "tool_use" for tools.
// Special tokens: tokenizer_config.json, as strings or
// {"content": ...} objects. NotFound "no chat template in ..." when there is none; InvalidArgument
// naming file and key when something has the wrong shape. `template_file`, unless empty, is read in
// place of both; the special tokens remain.
absl::StatusOr<ChatConfig> LoadChatConfig(const std::string& dir,
                                          const std::string& template_file = "");
// A template that takes the place of a model's own. InvalidArgument when the file is empty.
absl::StatusOr<std::string> ReadChatTemplate(const std::string& path);

// A config's templates, parsed. Immutable; any thread may render.
class ChatFormat {
 public:
  // Errors as ChatTemplate::Parse.
  static absl::StatusOr<std::unique_ptr<ChatFormat>> Create(const ChatConfig& config);

  // The text of a conversation as transformers' apply_chat_template makes it. `request` is an
  // object: messages, and optionally tools, documents, add_generation_prompt (true when absent) and
  // whatever else the template knows (enable_thinking, ...), which wins over the special tokens.
  // Errors as ChatTemplate::Render; InvalidArgument when messages is missing.
  absl::StatusOr<std::string> Render(const OrderedJson& request) const;

  // Whether the template that tools would be rendered by mentions them. One that does not leaves
  // them out without a word.
  bool knows_tools() const { return knows_tools_; }

 private:
  ChatFormat() = default;

  std::unique_ptr<ChatTemplate> chat_template_;
  std::unique_ptr<ChatTemplate> tool_template_;  // null: chat_template_ serves
  bool knows_tools_ = false;
  std::vector<std::pair<std::string, std::string>> special_tokens_;
};

}  // namespace lockstep
