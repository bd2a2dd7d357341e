#include "launch/openai/token_texts.h"

#include <algorithm>

#include "launch/openai/json_text.h"
#include "model/tokenizer/utf8.h"

namespace lockstep {

namespace {

TokenText Make(const std::string& bytes) {
  TokenText text;
  std::string readable = bytes;
  const bool is_text = FindInvalidUtf8(bytes) == std::string_view::npos;
  if (!is_text) {
    readable.clear();
    for (const char c : bytes) readable += absl::StrFormat("\\x%02x", static_cast<uint8_t>(c));
  }
  AppendJsonString(readable, &text.chat_text);
  AppendJsonString(is_text ? readable : "bytes:" + readable, &text.completion_text);
  for (const char c : bytes) {
    Separate(&text.bytes);
    absl::StrAppend(&text.bytes, static_cast<int>(static_cast<uint8_t>(c)));
  }
  text.bytes = "[" + text.bytes + "]";
  text.num_characters = std::count_if(
      bytes.begin(), bytes.end(), [](char c) { return (static_cast<uint8_t>(c) & 0xC0) != 0x80; });
  return text;
}

}  // namespace

const TokenText& TokenTexts::Get(int32_t id) {
  const auto found = texts_.find(id);
  if (found != texts_.end()) return found->second;
  const std::string bytes = tokenizer_ == nullptr ? IdAsText(id) : tokenizer_->TokenBytes(id);
  return texts_.emplace(id, Make(bytes)).first->second;
}

TokenText TokenTexts::GetFirst(int32_t id) const {
  if (tokenizer_ == nullptr) return Make(IdAsText(id));
  const std::string bytes = tokenizer_->TokenBytes(id);
  if (!bytes.starts_with(' ')) return Make(bytes);
  const auto decoded = tokenizer_->Decode({&id, 1}, /*skip_special_tokens=*/false);
  return Make(decoded.ok() ? *decoded : bytes);
}

std::string IdAsText(int32_t id) { return absl::StrCat(id, " "); }

}  // namespace lockstep
