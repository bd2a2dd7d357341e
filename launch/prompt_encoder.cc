#include "launch/prompt_encoder.h"

#include <utility>

namespace lockstep {

absl::StatusOr<PromptEncoder> PromptEncoder::Create(const std::string& model, bool chat) {
  PromptEncoder encoder;
  absl::StatusOr<std::unique_ptr<Tokenizer>> tokenizer = LoadTokenizer(model);
  if (tokenizer.ok()) {
    encoder.tokenizer_ = *std::move(tokenizer);
  } else if (absl::IsNotFound(tokenizer.status())) {
    encoder.missing_ = tokenizer.status();
  } else {
    return tokenizer.status();
  }
  if (chat) {
    LOCKSTEP_ASSIGN_OR_RETURN(encoder.chat_, LoadChatFormat(model));
  }
  return encoder;
}

absl::Status PromptEncoder::NeedTokenizer(const std::string& what) const {
  return has_tokenizer() ? absl::OkStatus() : Annotate(missing_, what + " needs a tokenizer");
}

absl::StatusOr<std::vector<int32_t>> PromptEncoder::EncodeText(const std::string& text) const {
  if (chats()) {
    return EncodeMessages(OrderedJson::array({{{"role", "user"}, {"content", text}}}));
  }
  LOCKSTEP_RETURN_IF_ERROR(NeedTokenizer("a prompt that is text and no ids"));
  return tokenizer_->Encode(text, /*add_special_tokens=*/true);
}

absl::StatusOr<std::vector<int32_t>> PromptEncoder::EncodeMessages(
    const OrderedJson& messages) const {
  LOCKSTEP_RETURN_IF_ERROR(NeedTokenizer("a chat"));
  OrderedJson request;
  request["messages"] = messages;
  LOCKSTEP_ASSIGN_OR_RETURN(const std::string rendered, chat_->Render(request));
  return tokenizer_->Encode(rendered, /*add_special_tokens=*/false);
}

}  // namespace lockstep
