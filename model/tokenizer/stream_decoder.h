// Detokenisation of a growing sequence, one id at a time.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "model/tokenizer/token_decoder.h"
#include "model/tokenizer/tokenizer.h"

namespace lockstep {

// Turns ids into text as they come. Every Push returns the text that no later id can change, always
// whole UTF-8 characters, so it may be empty; an unfinished character waits and becomes U+FFFD at
// Finish. All pushes and Finish joined equal Tokenizer::Decode of the same ids. A byte-fallback
// decoder judges a run of byte tokens as a whole, so such a run (newlines of Llama-2 are byte
// tokens) comes out with the next ordinary token.
//
// The cost of a Push does not depend on how many ids came before. Copyable (forked requests); not
// thread-safe. The tokenizer must outlive it.
class StreamDecoder {
 public:
  StreamDecoder(const Tokenizer* tokenizer, bool skip_special_tokens);

  // An id that no token has adds no text: models pad their vocabulary beyond the tokenizer's, and
  // may sample the padding.
  std::string Push(int32_t id);
  // The text still held. After it the decoder is as new.
  std::string Finish();

 private:
  const Tokenizer* tokenizer_;
  bool skip_special_tokens_;
  TokenDecoderState state_;
};

}  // namespace lockstep
