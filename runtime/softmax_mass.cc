#include "runtime/softmax_mass.h"

#include <algorithm>
#include <cmath>

#include "runtime/logit_blocks.h"
#include "runtime/softmax_steps.h"

namespace lockstep {

namespace {

constexpr double kLog2E = 1.44269504088896340736;
constexpr double kLn2 = 0.69314718055994530942;

constexpr int kUnitBits = 28 + 25;  // of a mass of 2^0

constexpr uint64_t kMantissaMask = (uint64_t{1} << 30) - 1;
// The mask makes a number of what is none: that of -infinity.
LOCKSTEP_INLINE uint64_t MantissaOf(double g) {
  return ToInteger(PowerWithinStep(g) * 0x1p28) & kMantissaMask;
}
LOCKSTEP_INLINE uint64_t BucketOf(double step, double top) {
  const double bucket = top - step;
  return ToInteger(bucket < kMassBuckets ? bucket : double{kMassBuckets});
}

// Mantissa and count of an id are added as one number: after 2^14 ids the counts take 15 bits above
// the 43 of the mantissas.
constexpr int64_t kFlushIds = 1 << 14;
constexpr int kCountShift = 44;
constexpr uint64_t kOne = uint64_t{1} << kCountShift;
// Neighbours go to different copies, so that equal buckets do not wait for each other.
constexpr int kCopies = 4;

template <int kSize>
struct PackedHistogram {
  uint64_t sums[kSize][kCopies] = {};

  // Moves all to mantissas [num_mantissas] and counts [kSize].
  void Flush(int num_mantissas, uint64_t* mantissas, uint32_t* counts) {
    for (int i = 0; i < kSize; ++i) {
      for (uint64_t& sum : sums[i]) {
        if (i < num_mantissas) mantissas[i] += sum & (kOne - 1);
        counts[i] += static_cast<uint32_t>(sum >> kCountShift);
        sum = 0;
      }
    }
  }
};

LOCKSTEP_INLINE void FillMassHistogramBody(const LogitSlice& slice, const MassBuckets& buckets,
                                           MassHistogram& histogram) {
  PackedHistogram<kMassBuckets + 1> packed;
  alignas(64) uint64_t bucket[kScanBlock];
  alignas(64) uint64_t sum[kScanBlock];
  float buffer[kScanBlock];
  const double scale = buckets.scale;
  const double top = buckets.top;
  int64_t pending = 0;
  for (int64_t begin = 0; begin < slice.size(); begin += kScanBlock) {
    const int64_t count = std::min(kScanBlock, slice.size() - begin);
    if (slice.block_max[begin / kScanBlock] * scale < top - kMassBuckets) {
      histogram.count[kMassBuckets] += static_cast<uint32_t>(count);
      continue;
    }
    const float* x = BlockAt(slice, begin, buffer);
    for (int i = 0; i < kScanBlock; ++i) {
      const double z = x[i] * scale;
      const double step = std::floor(z);
      bucket[i] = BucketOf(step, top);
      sum[i] = MantissaOf(z - step) | kOne;
    }
    for (int64_t i = 0; i < count; ++i) packed.sums[bucket[i]][i % kCopies] += sum[i];
    pending += kScanBlock;
    if (pending == kFlushIds) {
      packed.Flush(kMassBuckets, histogram.mantissas, histogram.count);
      pending = 0;
    }
  }
  packed.Flush(kMassBuckets, histogram.mantissas, histogram.count);
}
LOCKSTEP_VECTORISED(void, FillMassHistogram,
                    (const LogitSlice& slice, const MassBuckets& buckets, MassHistogram& histogram),
                    (slice, buckets, histogram))

LOCKSTEP_INLINE void AddCells(const float* x, int64_t count, const KeyCells& cells, double scale,
                              PackedHistogram<kCells>& packed) {
  alignas(64) uint32_t cell[kScanBlock];
  alignas(64) uint64_t sum[kScanBlock];
  for (int i = 0; i < kScanBlock; ++i) {
    cell[i] = static_cast<uint32_t>(uint64_t{OrderKey(x[i]) - cells.low} >> cells.shift);
  }
  for (int i = 0; i < kScanBlock; ++i) {
    const double z = x[i] * scale;
    sum[i] = MantissaOf(z - std::floor(z)) | kOne;
  }
  for (int64_t i = 0; i < count; ++i) packed.sums[cell[i]][i % kCopies] += sum[i];
}
LOCKSTEP_INLINE void FillCellHistogramBody(const LogitSlice& slice, const KeyCells& cells,
                                           const Survivors& survivors, double scale,
                                           CellHistogram& histogram) {
  PackedHistogram<kCells> packed;
  float found[kScanBlock] = {};
  int64_t num_found = 0;
  int64_t pending = 0;
  VisitSurvivors(slice, survivors, cells.low, cells.high, [&](int64_t i) LOCKSTEP_ALWAYS_INLINE {
    found[num_found++] = slice.logits[i];
    if (num_found < kScanBlock) return true;
    AddCells(found, kScanBlock, cells, scale, packed);
    num_found = 0;
    pending += kScanBlock;
    if (pending == kFlushIds) {
      packed.Flush(kCells, histogram.mantissas, histogram.count);
      pending = 0;
    }
    return true;
  });
  AddCells(found, num_found, cells, scale, packed);
  packed.Flush(kCells, histogram.mantissas, histogram.count);
}
LOCKSTEP_VECTORISED(void, FillCellHistogram,
                    (const LogitSlice& slice, const KeyCells& cells, const Survivors& survivors,
                     double scale, CellHistogram& histogram),
                    (slice, cells, survivors, scale, histogram))

// --- Sum of exp ---

constexpr int kTierSteps = 64;
// Beyond this, floats are so far apart that only ids equal to the largest count.
constexpr float kCoarse = 0x1p40f;
constexpr double kNaturalScale = kStepsPerOctave * kLog2E;  // of temperature 1

double TierOf(float max) { return std::floor(MassStep(max, kNaturalScale) / kTierSteps); }

}  // namespace

double MassScale(double temperature) { return kStepsPerOctave * kLog2E / temperature; }

double MassStep(float logit, double scale) { return std::floor(logit * scale); }

uint64_t Mantissa(float logit, double scale) {
  const double z = logit * scale;
  return MantissaOf(z - std::floor(z));
}

double RelativeMass(float logit, float max, double scale) {
  const double z = (static_cast<double>(logit) - max) * scale;
  if (!(z > -8000)) return 0;
  const double step = std::floor(z);
  const double octave = std::floor(step / kStepsPerOctave);
  const auto within = static_cast<size_t>(step - octave * kStepsPerOctave);
  return std::ldexp(PowerWithinStep(z - step) * StepPower(static_cast<int>(within)),
                    static_cast<int>(octave));
}

int MassBuckets::bucket(float logit) const {
  return static_cast<int>(BucketOf(MassStep(logit, scale), top));
}

Mass MassBuckets::unit(int bucket) const {
  if (bucket == kMassBuckets) return 0;
  const double step = top - bucket;
  const double octave = std::floor(step / kStepsPerOctave);
  const double lowest = std::floor((top - kMassBuckets) / kStepsPerOctave);
  return Mass{StepUnit(static_cast<int>(step - octave * kStepsPerOctave))}
         << static_cast<int>(octave - lowest);
}

Mass MassBuckets::mass(float logit) const { return unit(bucket(logit)) * Mantissa(logit, scale); }

void FillMassHistogram(const LogitSlice& slice, const MassBuckets& buckets,
                       MassHistogram& histogram) {
  histogram = {};
  FillMassHistogramVectorised(slice, buckets, histogram);
}

void FillCellHistogram(const LogitSlice& slice, const KeyCells& cells, const Survivors& survivors,
                       double scale, CellHistogram& histogram) {
  histogram = {};
  FillCellHistogramVectorised(slice, cells, survivors, scale, histogram);
}

ExpSum SumExp(const LogitSlice& slice, float max) {
  ExpSum sum{.max = max};
  if (std::isnan(max) || max == kMinusInfinity) return sum;
  if (std::abs(max) >= kCoarse) {
    sum.tiers[0] =
        static_cast<uint64_t>(std::count(slice.logits, slice.logits + slice.size(), max));
    return sum;
  }
  MassHistogram histogram;
  const double top = MassStep(max, kNaturalScale);
  FillMassHistogram(slice, {.scale = kNaturalScale, .top = top}, histogram);
  const double top_tier = TierOf(max);
  for (int bucket = 0; bucket < kMassBuckets; ++bucket) {
    const double step = top - bucket;
    const double tier = std::floor(step / kTierSteps);
    const int depth = static_cast<int>(top_tier - tier);
    if (depth >= kTiers) break;
    const auto within = static_cast<int>(step - tier * kTierSteps);
    sum.tiers[depth] += Mass{histogram.mantissas[bucket]} * StepUnit(within % kStepsPerOctave)
                        << (within / kStepsPerOctave);
  }
  return sum;
}

ExpSum Add(const ExpSum& a, const ExpSum& b) {
  if (std::isnan(a.max) || std::isnan(b.max)) {
    return {.max = std::numeric_limits<float>::quiet_NaN()};
  }
  ExpSum sum = a.max >= b.max ? a : b;
  const ExpSum& other = a.max >= b.max ? b : a;
  if (other.max == kMinusInfinity) return sum;
  if (std::abs(sum.max) >= kCoarse || std::abs(other.max) >= kCoarse) {
    if (other.max == sum.max) sum.tiers[0] += other.tiers[0];
    return sum;
  }
  const double lower = TierOf(sum.max) - TierOf(other.max);
  for (int tier = 0; tier + lower < kTiers; ++tier) {
    sum.tiers[tier + static_cast<int>(lower)] += other.tiers[tier];
  }
  return sum;
}

double LogSumAboveMax(const ExpSum& sum) {
  if (std::abs(sum.max) >= kCoarse) return std::log(static_cast<double>(sum.tiers[0]));
  constexpr int kTierOctaves = kTierSteps / kStepsPerOctave;
  double total = 0;
  for (int tier = kTiers - 1; tier >= 0; --tier) {
    total = total * std::ldexp(1.0, -kTierOctaves) + static_cast<double>(sum.tiers[tier]);
  }
  const double octave = TierOf(sum.max) * kTierOctaves - kUnitBits;
  return std::log(total) + (octave * kLn2 - sum.max);
}

}  // namespace lockstep
