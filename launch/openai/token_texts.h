// Single tokens as text, for log probabilities.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>

#include "model/tokenizer/tokenizer.h"

namespace lockstep {

// A token as JSON, ready to be copied into a response.
struct TokenText {
  std::string chat_text;        // "\" world\""; bytes that are no characters as \xF0
  std::string completion_text;  // the same, but "bytes:\xF0", as OpenAI's older API spells it
  std::string bytes;            // "[32,119,111]"
  int64_t num_characters = 0;   // characters that begin in it
};

// Made when first asked for, then kept: at most the vocabulary. Not thread-safe.
class TokenTexts {
 public:
  // Null: tokens are written as their ids and a blank.
  explicit TokenTexts(const Tokenizer* tokenizer) : tokenizer_(tokenizer) {}

  // Inside a text.
  const TokenText& Get(int32_t id);
  // At the start of a text, where some decoders drop a blank.
  TokenText GetFirst(int32_t id) const;
  const Tokenizer* tokenizer() const { return tokenizer_; }

 private:
  const Tokenizer* tokenizer_;
  std::unordered_map<int32_t, TokenText> texts_;
};

// What stands for a token where there is no tokenizer.
std::string IdAsText(int32_t id);

}  // namespace lockstep
