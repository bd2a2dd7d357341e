// What a request does to its raw logits before a token is picked: bias, ban, penalties.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "runtime/core/range.h"

namespace lockstep {

struct LogitBias {
  double bias = 0;
  int32_t id = 0;
  int32_t unused = 0;  // no padding: travels in the plan
};

struct LogitAdjustments {
  double repetition_penalty = 1;
  double frequency_penalty = 0;
  double presence_penalty = 0;
  std::span<const LogitBias> bias;  // each id once
  // Ids that cannot be picked at positions below `banned_below`.
  std::span<const int32_t> banned_ids;
  int64_t banned_below = 0;
};

// One request's adjustments on one rank: of the ids of the rank's part of the vocabulary alone, so
// nothing is exchanged. Cost follows the number of distinct ids, not the vocabulary. Not
// thread-safe, but Apply may run beside others' Apply.
class LogitAdjuster {
 public:
  // `history` holds the request's tokens so far, of which the first `prompt_length` are the prompt
  // (all of the prompt is in it, or the penalties do not need it). Ids outside `vocab` are ignored.
  // Nothing that is passed needs to outlive the call.
  LogitAdjuster(Range vocab, const LogitAdjustments& adjustments, std::span<const int32_t> history,
                int64_t prompt_length);

  // The request's next generated token.
  void Add(int32_t id);

  // Changes logits [V_local] of the token at `position`, in this order: bias, ban (-infinity),
  // repetition, frequency, presence penalty. A NaN stays a NaN.
  void Apply(int64_t position, float* logits) const;
};

}  // namespace lockstep
