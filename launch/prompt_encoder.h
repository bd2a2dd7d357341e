// Prompts to token ids: the model's tokenizer and, for chats, its template.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "launch/tokenizer_loading.h"
#include "runtime/core/json.h"

namespace lockstep {

class PromptEncoder {
 public:
  // A model without a tokenizer is no error here; with `chat` it must have a template.
  static absl::StatusOr<PromptEncoder> Create(const std::string& model, bool chat);

  bool has_tokenizer() const { return tokenizer_ != nullptr; }
  const Tokenizer* tokenizer() const { return tokenizer_.get(); }  // nullptr: the model has none
  bool chats() const { return chat_ != nullptr; }
  // NotFound, `what` in front, when there is no tokenizer.
  absl::Status NeedTokenizer(const std::string& what) const;

  // With chat: `text` is a user's message. Special tokens as a prompt gets them.
  absl::StatusOr<std::vector<int32_t>> EncodeText(const std::string& text) const;
  // Only with chat: a list of messages.
  absl::StatusOr<std::vector<int32_t>> EncodeMessages(const OrderedJson& messages) const;

 private:
  PromptEncoder() = default;

  std::unique_ptr<Tokenizer> tokenizer_;
  absl::Status missing_;  // why there is no tokenizer
  std::unique_ptr<ChatFormat> chat_;
};

}  // namespace lockstep
