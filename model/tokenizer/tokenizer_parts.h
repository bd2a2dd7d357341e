// What a tokenizer is made of: the sections of a tokenizer.json, read and checked. Readers of other
// formats (gguf_vocab.h) fill the same struct.
#pragma once

#include <cstdint>
#include <vector>

#include "model/tokenizer/added_tokens.h"
#include "model/tokenizer/bpe.h"
#include "model/tokenizer/normalizer.h"
#include "model/tokenizer/pre_tokenizer.h"
#include "model/tokenizer/token_decoder.h"
#include "model/tokenizer/vocabulary.h"

namespace lockstep {

struct TokenizerParts {
  Normalizer normalizer;
  PreTokenizer pre_tokenizer;
  Vocabulary vocabulary;
  std::vector<Merge> merges;
  BpeOptions bpe;  // pieces_are_bytes is taken from the pre-tokenizer
  std::vector<AddedToken> added_tokens;
  TokenDecoder decoder;
  // The post-processor's template: ids around the text's own when special tokens are added.
  std::vector<int32_t> prefix;
  std::vector<int32_t> suffix;
};

}  // namespace lockstep
