// What a request does to its raw logits before a token is picked: bias, ban, penalties.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "runtime/core/host_device.h"
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

struct LogitPenalties {
  double repetition = 1;
  double frequency = 0;
  double presence = 0;
};

// Bias, then repetition, frequency and presence penalty. NaN and +infinity stay.
LOCKSTEP_HOST_DEVICE_INLINE float AdjustedLogit(float logit, double bias, bool in_prompt,
                                                int32_t generated,
                                                const LogitPenalties& penalties) {
  if (!(logit <= 3.402823466e+38f)) return logit;
  double x = logit + bias;
  if (in_prompt || generated > 0) {
    x = x > 0 ? x / penalties.repetition : x * penalties.repetition;
  }
  if (generated > 0) x -= penalties.frequency * generated + penalties.presence;
  return static_cast<float>(x);
}

// One request's adjustments on one rank: of the ids of the rank's part of the vocabulary alone, so
// nothing is exchanged. Cost follows the number of distinct ids, not the vocabulary. Not
// thread-safe, but Apply may run beside others' Apply.
class LogitAdjuster {
 public:
  // What happens to the logit of one column.
  struct Entry {
    double bias = 0;
    int32_t index = 0;      // within the rank's columns
    int32_t generated = 0;  // occurrences
    bool banned = false;
    bool in_prompt = false;
  };

  // `history` holds the request's tokens so far, of which the first `prompt_length` are the prompt
  // (all of the prompt is in it, or the penalties do not need it). Ids outside `vocab` are ignored.
  // Nothing that is passed needs to outlive the call.
  LogitAdjuster(Range vocab, const LogitAdjustments& adjustments, std::span<const int32_t> history,
                int64_t prompt_length);

  // The request's next generated token.
  void Add(int32_t id);
  // Apply depends on the tokens that were added.
  bool needs_tokens() const {
    return penalties_.repetition != 1 || penalties_.frequency != 0 || penalties_.presence != 0;
  }
  // What Apply works with, for who applies it elsewhere.
  std::span<const Entry> entries() const { return entries_; }
  const LogitPenalties& penalties() const { return penalties_; }
  bool bans(int64_t position) const { return position < banned_below_; }
  // At least the number of entries on any rank: the same on all of them.
  int64_t MaxEntries(int64_t position) const {
    if (penalties_.repetition != 1) return num_listed_ + position;
    return num_listed_ + (needs_tokens() ? position - prompt_length_ : 0);
  }

  // Changes logits [V_local] of the token at `position`, in this order: bias, ban (-infinity),
  // repetition, frequency, presence penalty. A NaN stays a NaN and +infinity stays +infinity, so
  // that a faulty row is seen after it as well. `raw` gets what stood there before, for RawLogit.
  void Apply(int64_t position, float* logits, std::vector<float>* raw = nullptr) const;

  // The logit of `id` before the Apply that gave `raw`; `logits` is what Apply left. No Add
  // between.
  float RawLogit(int32_t id, const float* logits, std::span<const float> raw) const;

 private:
  float Adjusted(const Entry& entry, bool ban, float logit) const;
  // The slot in table_ of a column: that of its entry, or a free one.
  size_t FindSlot(int32_t index) const;
  Entry& FindOrInsert(int32_t index);
  void Rehash(size_t num_slots);

  Range vocab_;
  LogitPenalties penalties_;
  int64_t banned_below_;
  int64_t prompt_length_;
  int64_t num_listed_;          // biases and bans of all ranks
  std::vector<Entry> entries_;  // one a column, in order of their appearance
  std::vector<int32_t> table_;  // open addressing: index into entries_, or kFree; 2^n slots
};

}  // namespace lockstep
