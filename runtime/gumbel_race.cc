#include "runtime/gumbel_race.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "runtime/logit_blocks.h"
#include "runtime/random_bits.h"

namespace lockstep {

namespace {

constexpr double kLn2 = 0.69314718055994530942;

// -log(-log(u)) for u = 1 - e, e uniform in (0, 1): the large values, which win, come from small e
// and keep full precision.
double GumbelFromBits(uint64_t bits) {
  const double e = (static_cast<double>(bits >> 11) + 0.5) * 0x1p-53;
  return -std::log(-std::log1p(-e));
}
// At least GumbelFromBits, at most 0.06 more than -log(e), which is above the noise: the bits of a
// double, read as an integer, are its logarithm to base 2 interpolated linearly, from below.
LOCKSTEP_INLINE double GumbelBound(uint64_t bits) {
  const double e = std::bit_cast<double>((bits >> 12) | 0x3ff0000000000000) - 1.0;  // below e
  const uint64_t high = std::bit_cast<uint64_t>(e) >> 32;
  return (0x1p20 * 1023 - ToDouble(high)) * (kLn2 * 0x1p-20) + 1e-9;
}

struct Race {
  uint64_t row_key = 0;
  double inverse_temperature = 0;
  RaceResult best;
};

// Which of a block's ids have a logit of at least min_logit and noise that may lift them to the
// best so far: only those pay for two logarithms.
LOCKSTEP_INLINE uint64_t ContendersIn(const float* x, uint64_t first_id, float min_logit,
                                      const Race& race) {
  const double inverse_temperature = race.inverse_temperature;
  const double score = race.best.score;
  const uint64_t first = race.row_key + (first_id + 1) * kGoldenGamma;
  alignas(64) uint64_t contends[kScanBlock];
  for (int i = 0; i < kScanBlock; ++i) {
    const uint64_t bits = Mix(first + static_cast<uint64_t>(i) * kGoldenGamma);
    const double reach = x[i] * inverse_temperature + GumbelBound(bits);
    const uint64_t reaches = reach >= score ? 1 : 0;
    const uint64_t allowed = x[i] >= min_logit ? 1 : 0;
    contends[i] = reaches & allowed;
  }
  uint64_t any = 0;
  for (int i = 0; i < kScanBlock; ++i) any |= contends[i];
  if (any == 0) return 0;
  uint64_t contenders = 0;
  for (int i = 0; i < kScanBlock; ++i) contenders |= contends[i] << i;
  return contenders;
}
// Ids of [begin, end) of the slice with a logit of at least min_logit.
LOCKSTEP_INLINE void RunRaceBody(const LogitSlice& slice, int64_t begin, int64_t end,
                                 float min_logit, Race& race) {
  float buffer[kScanBlock];
  for (int64_t block = begin / kScanBlock * kScanBlock; block < end; block += kScanBlock) {
    if (slice.block_max[block / kScanBlock] < min_logit) continue;
    const auto first_id = static_cast<uint64_t>(slice.vocab.begin + block);
    uint64_t contenders = ContendersIn(BlockAt(slice, block, buffer), first_id, min_logit, race) &
                          BitRange(begin - block, end - block);
    for (; contenders != 0; contenders &= contenders - 1) {
      const int i = std::countr_zero(contenders);
      const uint64_t id = first_id + static_cast<uint64_t>(i);
      const double score = slice.logits[block + i] * race.inverse_temperature +
                           GumbelFromBits(RandomBits(race.row_key, id));
      // Ids rise within a call, so the first of equal scores has the lowest.
      if (score > race.best.score) race.best = {score, static_cast<int32_t>(id)};
    }
  }
}
LOCKSTEP_VECTORISED(void, RunRace,
                    (const LogitSlice& slice, int64_t begin, int64_t end, float min_logit,
                     Race& race),
                    (slice, begin, end, min_logit, race))

}  // namespace

double GumbelNoise(uint64_t seed, int64_t position, int64_t id) {
  return GumbelFromBits(RandomBits(RowKey(seed, position), static_cast<uint64_t>(id)));
}

RaceResult GumbelRace(const LogitSlice& slice, const Survivors& survivors, uint64_t seed,
                      int64_t position, double inverse_temperature) {
  Race race{RowKey(seed, position), inverse_temperature, {}};
  const int64_t tie_end = std::clamp<int64_t>(survivors.tie_end, 0, slice.size());
  RunRaceVectorised(slice, 0, tie_end, FromOrderKey(survivors.floor), race);
  RunRaceVectorised(slice, tie_end, slice.size(), FromOrderKey(survivors.floor + 1), race);
  return race.best;
}

}  // namespace lockstep
