// Vectorised passes over one row's local logits: what the sampler and the log probabilities share.
//
// Softmax masses are integers, which sum to the same total in any order: exp is 2^y, y = logit *
// scale split into octave floor(y) and mantissa, a polynomial in double precision (relative error
// 7e-12, rounded to 2^-29). Neither it nor anything else here contracts to fused operations, so all
// CPUs and instruction sets give the same bits. Nothing refers to the largest logit but the choice
// of what is too small to count, so masses of two ranks can be added as they are.
//
// Rows hold no NaN and no +infinity, but for ScanMax. Thread-safe.
#pragma once

#include <bit>
#include <cstdint>
#include <limits>
#include <span>

#include "runtime/core/range.h"

namespace lockstep {

inline constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// Passes skip blocks by their largest logit.
inline constexpr int64_t kScanBlock = 64;
inline int64_t NumScanBlocks(int64_t count) { return (count + kScanBlock - 1) / kScanBlock; }

// One row's local columns.
struct LogitSlice {
  const float* logits = nullptr;
  const float* block_max = nullptr;  // [NumScanBlocks(size)], from ScanMax
  Range vocab;                       // their ids

  int64_t size() const { return vocab.size(); }
};

// The largest of logits[0, count), or NaN when there is a NaN or +infinity.
float ScanMax(const float* logits, int64_t count, float* block_max);

// Unsigned integers in the order of the floats; both zeros are one.
inline uint32_t OrderKey(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x + 0.0f);
  return (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
}
inline float FromOrderKey(uint32_t key) {
  return std::bit_cast<float>((key >> 31) != 0 ? key & 0x7fffffffu : ~key);
}

inline constexpr uint32_t kLowestKey = 0x007fffffu;  // of -infinity

struct LogitAndId {
  float logit = 0;
  int32_t id = 0;
};
inline bool Better(const LogitAndId& a, const LogitAndId& b) {
  return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
}
// The min(out.size(), size) best, best first, lowest ids on ties; returns their number.
int64_t SelectTop(const LogitSlice& slice, std::span<LogitAndId> out);

// --- Softmax mass at a temperature ---

// Octaves of mass that count, below that of the largest logit: V * 2^-40 is nothing.
inline constexpr int kOctaves = 40;
inline constexpr int kBucketsPerOctave = 8;
inline constexpr int kMassBuckets = kOctaves * kBucketsPerOctave;

// Octaves of mass a unit of logit.
double MassScale(double temperature);
// Octave of a logit.
double Octave(float logit, double scale);
// 2^28 to 2^29: mass in units of 2^(octave - 28).
uint64_t Mantissa(float logit, double scale);
// exp((logit - max) / temperature).
double RelativeMass(float logit, float max, double scale);
// Falls with the logit: bucket b holds masses of octave top_octave - b / kBucketsPerOctave;
// kMassBuckets holds all below.
int MassBucket(float logit, double scale, double top_octave);

struct MassHistogram {
  uint64_t mass[kMassBuckets];  // sums of Mantissa
  uint32_t count[kMassBuckets + 1];
  uint32_t unused;
};
void FillMassHistogram(const LogitSlice& slice, double scale, double top_octave,
                       MassHistogram& histogram);

// Keys [low, high] cut into cells of 2^shift keys, lowest first.
inline constexpr int kCellBits = 9;
inline constexpr int kCells = 1 << kCellBits;
struct KeyCells {
  uint32_t low = 0;
  uint32_t high = 0;
  int shift = 0;

  int cell(uint32_t key) const { return static_cast<int>(uint64_t{key - low} >> shift); }
};
struct CellHistogram {
  uint64_t mass[kCells];  // sums of Mantissa
  uint32_t count[kCells];
};
// Of the ids before index `tie_end` keys from `floor` on count, of the others keys above it.
struct Survivors {
  uint32_t floor = kLowestKey;
  int64_t tie_end = 0;  // index within the slice

  bool Has(uint32_t key, int64_t index) const {
    return key > floor || (key == floor && index < tie_end);
  }
};
void FillCellHistogram(const LogitSlice& slice, const KeyCells& cells, const Survivors& survivors,
                       double scale, CellHistogram& histogram);
// Up to out.size() survivors with keys in [low, high], by rising id; returns their number.
int64_t CollectRange(const LogitSlice& slice, uint32_t low, uint32_t high,
                     const Survivors& survivors, std::span<LogitAndId> out);
// The index behind the `count`-th id whose key is `key`; the slice's size when there are fewer.
int64_t FindTieEnd(const LogitSlice& slice, uint32_t key, int64_t count);

// --- Sum of exp(logit), exact in the sense above ---

// Masses of 8 octaves share a sum, so 2^23 ids fit. 7 sums reach at least 49 octaves below the
// largest logit.
inline constexpr int kTiers = 7;
struct ExpSum {
  float max = kMinusInfinity;  // NaN: the row has no log probabilities
  uint32_t unused = 0;
  uint64_t tiers[kTiers] = {};  // falling, from that of max
};
// `max`: the slice's largest logit.
ExpSum SumExp(const LogitSlice& slice, float max);
// Sum over ranks; the same in any order.
ExpSum Add(const ExpSum& a, const ExpSum& b);
// log(sum of exp(logit)) - max. The sum is that of at least one id.
double LogSumAboveMax(const ExpSum& sum);

// --- Gumbel-max ---

// Noise of one vocabulary id, Gumbel(0, 1) distributed.
double GumbelNoise(uint64_t seed, int64_t position, int64_t id);

struct RaceResult {
  double score = -std::numeric_limits<double>::infinity();
  int32_t id = -1;  // -1: nobody took part
};
// The largest logit * inverse_temperature + noise among the survivors; lowest id on ties.
RaceResult GumbelRace(const LogitSlice& slice, const Survivors& survivors, uint64_t seed,
                      int64_t position, double inverse_temperature);

}  // namespace lockstep
