// A decoder without arithmetic, for tests of what stands around it: scheduler, pages, ranks,
// sampling and serving at the speed that they have themselves.
//
// It follows the pages as attention does. Each token leaves a digest of itself and of all tokens
// before it where its first key would lie: digest = NullDigest(digest of the token before, found
// through the block table, or kNullDigestStart; token). The next token is NullToken(digest), so an
// answer depends on its whole prompt and on nothing else, and a caller can say what it must be. A
// page that is read or written wrongly shows as a wrong answer.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "cache/kv_pool.h"
#include "model/decoder.h"
#include "runtime/core/range.h"

namespace lockstep {

struct NullDecoderOptions {
  Range vocab;                         // this rank's columns of the logits
  int64_t vocab_size = 0;              // V
  std::vector<int32_t> end_token_ids;  // never the next token, so that answers have full length
  double step_seconds = 0;             // from the beginning of a step to that of the next; 0: none
  std::function<void()> mark = {};     // is called now and then while a step goes on; may be empty
};

inline constexpr uint64_t kNullDigestStart = 0x9e3779b97f4a7c15;

inline uint64_t NullDigest(uint64_t before, int32_t token) {
  const uint64_t mixed = (before ^ static_cast<uint64_t>(token)) * 0xbf58476d1ce4e5b9;
  return mixed ^ (mixed >> 32);
}

// In [0, vocab_size): from there on the first that does not end the answer.
inline int32_t NullToken(uint64_t digest, int64_t vocab_size, std::span<const int32_t> ends) {
  uint64_t id = digest % static_cast<uint64_t>(vocab_size);
  for (int64_t tries = 0; tries < vocab_size; ++tries) {
    if (std::find(ends.begin(), ends.end(), static_cast<int32_t>(id)) == ends.end()) break;
    id = (id + 1) % static_cast<uint64_t>(vocab_size);
  }
  return static_cast<int32_t>(id);
}

// The next token's logit; all others are 0. Above what penalties take away, and sure at usual
// temperatures; a bias of 100 is more.
inline constexpr float kNullLogit = 50;

// InvalidArgument when a key of the pool is too short for a digest.
absl::Status CheckNullPool(const KvPoolShape& shape);
std::unique_ptr<Decoder> MakeNullDecoder(const NullDecoderOptions& options);

}  // namespace lockstep
