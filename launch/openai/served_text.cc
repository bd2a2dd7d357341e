#include "launch/openai/served_text.h"

#include "launch/tokenizer_loading.h"
#include "runtime/core/log.h"

namespace lockstep {

absl::Status LoadServedText(const std::string& model, const std::string& chat_template,
                            ServedText* text) {
  auto tokenizer = LoadTokenizer(model);
  if (!tokenizer.ok() && !absl::IsNotFound(tokenizer.status())) return tokenizer.status();
  if (!tokenizer.ok()) {
    text->model.no_chat_reason = "the model has no tokenizer";
    LogWarning("the model has no tokenizer: prompts must be lists of ids, answers are ids");
    if (chat_template.empty()) return absl::OkStatus();
    return Annotate(tokenizer.status(), "--chat-template needs a tokenizer");
  }
  text->tokenizer = *std::move(tokenizer);
  text->model.tokenizer = text->tokenizer.get();
  auto chat = LoadChatFormat(model, chat_template);
  if (chat.ok()) {
    text->chat = *std::move(chat);
    text->model.chat = text->chat.get();
    return absl::OkStatus();
  }
  // Completions do without a template, and --chat-template can mend what is wrong with it.
  if (!chat_template.empty()) return Annotate(chat.status(), "--chat-template");
  text->model.no_chat_reason = std::string(chat.status().message());
  LogWarning("chats are refused: " + text->model.no_chat_reason);
  return absl::OkStatus();
}

}  // namespace lockstep
