#include "model/tokenizer/stream_decoder.h"

namespace lockstep {

StreamDecoder::StreamDecoder(const Tokenizer* tokenizer, bool skip_special_tokens)
    : tokenizer_(tokenizer),
      skip_special_tokens_(skip_special_tokens),
      state_(tokenizer->decoder().NewState()) {}

std::string StreamDecoder::Push(int32_t id) {
  std::string text;
  if (!tokenizer_->HasToken(id) || (skip_special_tokens_ && tokenizer_->IsSpecial(id))) return text;
  tokenizer_->decoder().Push(tokenizer_->IdToToken(id), &state_, &text);
  return text;
}

std::string StreamDecoder::Finish() {
  std::string text;
  tokenizer_->decoder().Finish(&state_, &text);
  return text;
}

}  // namespace lockstep
