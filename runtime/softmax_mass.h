// Softmax mass as integers, which sum to the same total in any order: of one row's local logits at
// a temperature, as histograms and as a sum.
//
// exp(logit / temperature) = 2^(z / 8), z = logit * scale. Its step floor(z) and its mantissa, a
// polynomial in z - floor(z) in double precision (relative error 1e-11, then rounded to 2^-29),
// depend on nothing else, so ranks can add theirs. The factors between steps are rounded to 2^-26.
// Nothing contracts to fused operations: all CPUs and instruction sets give the same bits. All
// functions are thread-safe.
#pragma once

#include <cstdint>

#include "runtime/logit_scan.h"

namespace lockstep {

inline constexpr int kStepsPerOctave = 8;
// Steps that count, below that of the largest logit. V * 2^-48 is nothing.
inline constexpr int kOctaves = 48;
inline constexpr int kMassBuckets = kOctaves * kStepsPerOctave;

// Below 2^(29 + 26 + 48) for one id, so the sum of 2^23 fits.
__extension__ typedef unsigned __int128 Mass;

// Steps a unit of logit.
double MassScale(double temperature);
double MassStep(float logit, double scale);
// 2^28 to 2^28.125.
uint64_t Mantissa(float logit, double scale);
// exp((logit - max) / temperature).
double RelativeMass(float logit, float max, double scale);

// The buckets of a row whose largest logit has the step `top`: a bucket a step downwards, and
// kMassBuckets for all below, which have no mass.
struct MassBuckets {
  double scale = 1;
  double top = 0;

  int bucket(float logit) const;
  Mass mass(float logit) const;
  // Of one unit of Mantissa in a bucket.
  Mass unit(int bucket) const;
};

struct MassHistogram {
  uint64_t mantissas[kMassBuckets];  // sums
  uint32_t count[kMassBuckets + 1];
  uint32_t unused;
};
void FillMassHistogram(const LogitSlice& slice, const MassBuckets& buckets,
                       MassHistogram& histogram);

// Keys [low, high] cut into at most kCells cells of 2^shift keys, lowest first.
inline constexpr int kCellBits = 9;
inline constexpr int kCells = 1 << kCellBits;
struct KeyCells {
  uint32_t low = 0;
  uint32_t high = 0;
  int shift = 0;

  int cell(uint32_t key) const { return static_cast<int>(uint64_t{key - low} >> shift); }
};
struct CellHistogram {
  uint64_t mantissas[kCells];  // sums
  uint32_t count[kCells];
};
void FillCellHistogram(const LogitSlice& slice, const KeyCells& cells, const Survivors& survivors,
                       double scale, CellHistogram& histogram);

// Sum of exp(logit). Masses of 8 octaves share a sum; 6 sums reach at least 41 octaves below the
// largest logit.
inline constexpr int kTiers = 6;
struct ExpSum {
  float max = kMinusInfinity;  // NaN: the row has no log probabilities
  uint32_t unused[3] = {};
  Mass tiers[kTiers] = {};  // falling, from that of max
};
// `max`: the slice's largest logit, or NaN.
ExpSum SumExp(const LogitSlice& slice, float max);
// Sum over ranks; the same in any order.
ExpSum Add(const ExpSum& a, const ExpSum& b);
// log(sum of exp(logit)) - max. The sum is that of at least one id.
double LogSumAboveMax(const ExpSum& sum);

}  // namespace lockstep
