#include "runtime/logit_scan.h"

#include <algorithm>
#include <array>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <vector>

// The bodies below are plain loops over blocks, compiled for each instruction set: baseline x86-64
// has neither 64-bit products nor floor.
#if defined(__x86_64__) && defined(__GNUC__)
#define LOCKSTEP_VECTOR_CLONES(result, name, parameters, arguments)                             \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")))         \
  result name##Avx512 parameters {                                                              \
    return name##Body arguments;                                                                \
  }                                                                                             \
  __attribute__((target("avx2"))) result name##Avx2 parameters { return name##Body arguments; } \
  result name##Vectorised parameters {                                                          \
    if (kHasAvx512) return name##Avx512 arguments;                                              \
    if (kHasAvx2) return name##Avx2 arguments;                                                  \
    return name##Body arguments;                                                                \
  }
#else
#define LOCKSTEP_VECTOR_CLONES(result, name, parameters, arguments) \
  result name##Vectorised parameters { return name##Body arguments; }
#endif
#define LOCKSTEP_BODY inline __attribute__((always_inline))

namespace lockstep {

namespace {

#if defined(__x86_64__) && defined(__GNUC__)
const bool kHasAvx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
const bool kHasAvx2 = __builtin_cpu_supports("avx2");
#endif

constexpr double kLog2E = 1.44269504088896340736;
constexpr double kLn2 = 0.69314718055994530942;
constexpr double kSqrt2 = 1.41421356237309504880;
// Keeps -infinity out of the arithmetic; far below every finite logit * scale.
constexpr double kLowest = -1e300;

// --- 2^y ---

// Taylor series of 2^f about f = 1/2; the first term left out is (ln2 / 2)^10 / 10!.
constexpr int kDegree = 9;
constexpr std::array<double, kDegree + 1> MakeExp2Series() {
  std::array<double, kDegree + 1> series{};
  double term = kSqrt2;
  for (int i = 0; i <= kDegree; ++i) {
    series[i] = term;
    term *= kLn2 / (i + 1);
  }
  return series;
}
constexpr std::array<double, kDegree + 1> kExp2Series = MakeExp2Series();

// 2^f, f in [0, 1].
LOCKSTEP_BODY double Exp2Fraction(double f) {
  const double x = f - 0.5;
  double sum = kExp2Series[kDegree];
  for (int i = kDegree - 1; i >= 0; --i) sum = sum * x + kExp2Series[i];
  return sum;
}

// Rounds 0 <= x < 2^51 to an integer, without an instruction for it.
LOCKSTEP_BODY uint64_t ToInteger(double x) {
  return std::bit_cast<uint64_t>(x + 0x1p52) & ((uint64_t{1} << 52) - 1);
}
LOCKSTEP_BODY double ToDouble(uint64_t x) {  // x < 2^52
  return std::bit_cast<double>(x | 0x4330000000000000) - 0x1p52;
}

LOCKSTEP_BODY double Exponent(float logit, double scale) {
  const double y = logit * scale;
  return y > kLowest ? y : kLowest;
}
LOCKSTEP_BODY uint64_t MantissaOf(double fraction) {
  return ToInteger(Exp2Fraction(fraction) * 0x1p28);
}
LOCKSTEP_BODY uint64_t BucketOf(double octave, double fraction, double top_octave) {
  double sub = std::floor(fraction * kBucketsPerOctave);
  sub = sub < kBucketsPerOctave - 1 ? sub : kBucketsPerOctave - 1;  // fraction may round to 1
  const double bucket = (top_octave - octave) * kBucketsPerOctave + (kBucketsPerOctave - 1 - sub);
  return ToInteger(bucket < kMassBuckets ? bucket : double{kMassBuckets});
}

// A block of kScanBlock logits; the end of a row is filled up with -infinity.
const float* BlockAt(const LogitSlice& slice, int64_t begin, float* buffer) {
  const int64_t count = slice.size() - begin;
  if (count >= kScanBlock) return slice.logits + begin;
  std::fill_n(buffer, kScanBlock, kMinusInfinity);
  std::copy_n(slice.logits + begin, count, buffer);
  return buffer;
}

// --- The largest ---

LOCKSTEP_BODY float BlockMaxBody(const float* x, int32_t* bad) {
  constexpr int kLanes = 16;
  float max[kLanes];
  for (int i = 0; i < kLanes; ++i) max[i] = x[i];
  for (int j = kLanes; j < kScanBlock; j += kLanes) {
    for (int i = 0; i < kLanes; ++i) max[i] = x[j + i] > max[i] ? x[j + i] : max[i];
  }
  for (int j = 0; j < kScanBlock; j += kLanes) {
    for (int i = 0; i < kLanes; ++i) bad[i] |= !(x[j + i] <= FLT_MAX);
  }
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) max[i] = max[i + width] > max[i] ? max[i + width] : max[i];
  }
  return max[0];
}
LOCKSTEP_BODY float ScanMaxBody(const float* logits, int64_t count, float* block_max) {
  int32_t bad[16] = {};
  float max = kMinusInfinity;
  int64_t begin = 0;
  for (; begin + kScanBlock <= count; begin += kScanBlock) {
    const float block = BlockMaxBody(logits + begin, bad);
    block_max[begin / kScanBlock] = block;
    max = block > max ? block : max;
  }
  if (begin < count) {
    float block = kMinusInfinity;
    for (int64_t i = begin; i < count; ++i) {
      block = logits[i] > block ? logits[i] : block;
      bad[0] |= !(logits[i] <= FLT_MAX);
    }
    block_max[begin / kScanBlock] = block;
    max = block > max ? block : max;
  }
  for (const int32_t b : bad) {
    if (b != 0) return std::numeric_limits<float>::quiet_NaN();
  }
  return max;
}
LOCKSTEP_VECTOR_CLONES(float, ScanMax, (const float* logits, int64_t count, float* block_max),
                       (logits, count, block_max))

// --- Histograms ---

// Mass and count of an id are added as one number: after 2^14 ids the counts take 15 bits above the
// 43 of the masses.
constexpr int64_t kFlushBlocks = (1 << 14) / kScanBlock;
constexpr int kCountShift = 44;
constexpr uint64_t kOne = uint64_t{1} << kCountShift;
// Neighbours go to different copies, so that equal buckets do not wait for each other.
constexpr int kCopies = 4;
struct PackedHistogram {
  uint64_t sums[kMassBuckets + 1][kCopies];
};
void Flush(PackedHistogram& packed, MassHistogram& histogram) {
  for (int bucket = 0; bucket <= kMassBuckets; ++bucket) {
    for (const uint64_t sum : packed.sums[bucket]) {
      if (bucket < kMassBuckets) histogram.mass[bucket] += sum & (kOne - 1);
      histogram.count[bucket] += static_cast<uint32_t>(sum >> kCountShift);
    }
  }
  packed = {};
}

LOCKSTEP_BODY void MassBlockBody(const float* x, double scale, double top_octave, uint64_t* bucket,
                                 uint64_t* packed) {
  for (int i = 0; i < kScanBlock; ++i) {
    const double y = Exponent(x[i], scale);
    const double octave = std::floor(y);
    bucket[i] = BucketOf(octave, y - octave, top_octave);
    packed[i] = MantissaOf(y - octave) | kOne;
  }
}
LOCKSTEP_BODY void FillMassHistogramBody(const LogitSlice& slice, double scale, double top_octave,
                                         MassHistogram& histogram) {
  PackedHistogram packed = {};
  alignas(64) uint64_t bucket[kScanBlock];
  alignas(64) uint64_t sum[kScanBlock];
  float buffer[kScanBlock];
  int64_t blocks = 0;
  for (int64_t begin = 0; begin < slice.size(); begin += kScanBlock) {
    const int64_t count = std::min(kScanBlock, slice.size() - begin);
    if (slice.block_max[begin / kScanBlock] * scale < top_octave - kOctaves) {
      histogram.count[kMassBuckets] += static_cast<uint32_t>(count);
      continue;
    }
    MassBlockBody(BlockAt(slice, begin, buffer), scale, top_octave, bucket, sum);
    for (int64_t i = 0; i < count; ++i) packed.sums[bucket[i]][i % kCopies] += sum[i];
    if (++blocks % kFlushBlocks == 0) Flush(packed, histogram);
  }
  Flush(packed, histogram);
}
LOCKSTEP_VECTOR_CLONES(void, FillMassHistogram,
                       (const LogitSlice& slice, double scale, double top_octave,
                        MassHistogram& histogram),
                       (slice, scale, top_octave, histogram))

LOCKSTEP_BODY void CellBlockBody(const float* x, double scale, uint32_t* key, uint64_t* mass) {
  for (int i = 0; i < kScanBlock; ++i) key[i] = OrderKey(x[i]);
  for (int i = 0; i < kScanBlock; ++i) {
    const double y = Exponent(x[i], scale);
    mass[i] = MantissaOf(y - std::floor(y));
  }
}
LOCKSTEP_BODY void FillCellHistogramBody(const LogitSlice& slice, const KeyCells& cells,
                                         const Survivors& survivors, double scale,
                                         CellHistogram& histogram) {
  const float low = FromOrderKey(cells.low);
  alignas(64) uint32_t key[kScanBlock];
  alignas(64) uint64_t mass[kScanBlock];
  float buffer[kScanBlock];
  for (int64_t begin = 0; begin < slice.size(); begin += kScanBlock) {
    if (slice.block_max[begin / kScanBlock] < low) continue;
    CellBlockBody(BlockAt(slice, begin, buffer), scale, key, mass);
    const int64_t count = std::min(kScanBlock, slice.size() - begin);
    for (int64_t i = 0; i < count; ++i) {
      if (key[i] < cells.low || key[i] > cells.high || !survivors.Has(key[i], begin + i)) continue;
      const int cell = cells.cell(key[i]);
      histogram.mass[cell] += mass[i];
      ++histogram.count[cell];
    }
  }
}
LOCKSTEP_VECTOR_CLONES(void, FillCellHistogram,
                       (const LogitSlice& slice, const KeyCells& cells, const Survivors& survivors,
                        double scale, CellHistogram& histogram),
                       (slice, cells, survivors, scale, histogram))

// --- Sum of exp ---

constexpr int kTierOctaves = 8;
// Beyond this, floats are so far apart that only ids equal to the largest count.
constexpr float kCoarse = 0x1p40f;

double TierOf(float max) { return std::floor(std::floor(max * kLog2E) / kTierOctaves); }

LOCKSTEP_BODY void SumExpBody(const LogitSlice& slice, double top_tier, uint64_t* tiers) {
  alignas(64) double depth[kScanBlock];
  alignas(64) uint64_t mass[kScanBlock];
  float buffer[kScanBlock];
  for (int64_t begin = 0; begin < slice.size(); begin += kScanBlock) {
    if (slice.block_max[begin / kScanBlock] * kLog2E < (top_tier - kTiers + 1) * kTierOctaves) {
      continue;
    }
    const float* x = BlockAt(slice, begin, buffer);
    for (int i = 0; i < kScanBlock; ++i) {
      const double y = Exponent(x[i], kLog2E);
      const double octave = std::floor(y);
      const double tier = std::floor(octave * (1.0 / kTierOctaves));
      const uint64_t within = ToInteger(octave - tier * kTierOctaves) & (kTierOctaves - 1);
      const double power = std::bit_cast<double>((within + 1023 + 32) << 52);
      mass[i] = ToInteger(Exp2Fraction(y - octave) * power);
      depth[i] = top_tier - tier;
    }
    for (int tier = 0; tier < kTiers; ++tier) {
      uint64_t sum = 0;
      for (int i = 0; i < kScanBlock; ++i) sum += depth[i] == tier ? mass[i] : 0;
      tiers[tier] += sum;
    }
  }
}
LOCKSTEP_VECTOR_CLONES(void, SumExp, (const LogitSlice& slice, double top_tier, uint64_t* tiers),
                       (slice, top_tier, tiers))

// --- Random numbers ---

// The finaliser of SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number
// generators", 2014).
constexpr uint64_t kGoldenGamma = 0x9e3779b97f4a7c15;
LOCKSTEP_BODY uint64_t Mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}
// The 64 random bits of id i are element i of the SplitMix64 stream that starts at RowKey.
uint64_t RowKey(uint64_t seed, int64_t position) {
  return Mix(Mix(seed + kGoldenGamma) ^ (static_cast<uint64_t>(position) * kGoldenGamma));
}
LOCKSTEP_BODY uint64_t RandomBits(uint64_t row_key, uint64_t id) {
  return Mix(row_key + (id + 1) * kGoldenGamma);
}

// -log(-log(u)) for u = 1 - e, e uniform in (0, 1): the large values, which win, come from small e
// and keep full precision.
double GumbelFromBits(uint64_t bits) {
  const double e = (static_cast<double>(bits >> 11) + 0.5) * 0x1p-53;
  return -std::log(-std::log1p(-e));
}
// At least GumbelFromBits, at most 0.06 more than -log(e), which is above the noise: the bits of a
// double, read as an integer, are its logarithm to base 2 interpolated linearly, from below.
LOCKSTEP_BODY double GumbelBound(uint64_t bits) {
  const double e = std::bit_cast<double>((bits >> 12) | 0x3ff0000000000000) - 1.0;  // below e
  const uint64_t high = std::bit_cast<uint64_t>(e) >> 32;
  return (0x1p20 * 1023 - ToDouble(high)) * (kLn2 * 0x1p-20) + 1e-9;
}

struct Race {
  uint64_t row_key = 0;
  double inverse_temperature = 0;
  RaceResult best;
};

// Only ids whose noise may lift them to the best so far pay for two logarithms.
LOCKSTEP_BODY uint64_t MarkBlockBody(const float* x, uint64_t first_id, float min_logit,
                                     const Race& race, uint64_t* mark) {
  const double inverse_temperature = race.inverse_temperature;
  const double score = race.best.score;
  const uint64_t first = race.row_key + (first_id + 1) * kGoldenGamma;
  for (int i = 0; i < kScanBlock; ++i) {
    const uint64_t bits = Mix(first + static_cast<uint64_t>(i) * kGoldenGamma);
    const double reach = x[i] * inverse_temperature + GumbelBound(bits);
    const uint64_t reaches = reach >= score ? 1 : 0;
    const uint64_t allowed = x[i] >= min_logit ? 1 : 0;
    mark[i] = reaches & allowed;
  }
  uint64_t any = 0;
  for (int i = 0; i < kScanBlock; ++i) any |= mark[i];
  return any;
}
// Ids of [begin, end) of the slice with a logit of at least min_logit.
LOCKSTEP_BODY void RunRaceBody(const LogitSlice& slice, int64_t begin, int64_t end, float min_logit,
                               Race& race) {
  alignas(64) uint64_t mark[kScanBlock];
  float buffer[kScanBlock];
  for (int64_t block = begin / kScanBlock * kScanBlock; block < end; block += kScanBlock) {
    if (slice.block_max[block / kScanBlock] < min_logit) continue;
    const auto first_id = static_cast<uint64_t>(slice.vocab.begin + block);
    const float* x = BlockAt(slice, block, buffer);
    if (MarkBlockBody(x, first_id, min_logit, race, mark) == 0) continue;
    for (int64_t i = std::max(block, begin); i < std::min(block + kScanBlock, end); ++i) {
      if (mark[i - block] == 0) continue;
      const uint64_t id = first_id + static_cast<uint64_t>(i - block);
      const double score =
          slice.logits[i] * race.inverse_temperature + GumbelFromBits(RandomBits(race.row_key, id));
      // Ids rise, so the first of equal scores stays.
      if (score > race.best.score) race.best = {score, static_cast<int32_t>(id)};
    }
  }
}
LOCKSTEP_VECTOR_CLONES(void, RunRace,
                       (const LogitSlice& slice, int64_t begin, int64_t end, float min_logit,
                        Race& race),
                       (slice, begin, end, min_logit, race))

}  // namespace

float ScanMax(const float* logits, int64_t count, float* block_max) {
  return ScanMaxVectorised(logits, count, block_max);
}

// The k-th largest of the blocks' maxima is a bar that at least k ids reach, and above which are
// only ids of fewer than k blocks.
int64_t SelectTop(const LogitSlice& slice, std::span<LogitAndId> out) {
  const int64_t wanted = std::min(static_cast<int64_t>(out.size()), slice.size());
  if (wanted == 0) return 0;
  const int64_t num_blocks = NumScanBlocks(slice.size());
  thread_local std::vector<float> maxima;
  thread_local std::vector<LogitAndId> above;  // above the bar
  float bar = kMinusInfinity;
  if (wanted <= num_blocks) {
    maxima.assign(slice.block_max, slice.block_max + num_blocks);
    std::nth_element(maxima.begin(), maxima.begin() + wanted - 1, maxima.end(), std::greater<>());
    bar = maxima[static_cast<size_t>(wanted - 1)];
  }
  above.clear();
  int64_t ties = 0;  // equal to the bar, lowest ids, from the front of `out`
  for (int64_t block = 0; block < num_blocks; ++block) {
    if (slice.block_max[block] < bar) continue;
    const int64_t end = std::min((block + 1) * kScanBlock, slice.size());
    for (int64_t i = block * kScanBlock; i < end; ++i) {
      const float logit = slice.logits[i];
      if (logit < bar) continue;
      const LogitAndId entry{logit, static_cast<int32_t>(slice.vocab.begin + i)};
      if (logit > bar) {
        above.push_back(entry);
      } else if (ties < wanted) {
        out[static_cast<size_t>(ties++)] = entry;
      }
    }
  }
  const int64_t num_above = std::min(wanted, static_cast<int64_t>(above.size()));
  std::partial_sort(above.begin(), above.begin() + num_above, above.end(), Better);
  std::copy_backward(out.begin(), out.begin() + (wanted - num_above), out.begin() + wanted);
  std::copy_n(above.begin(), num_above, out.begin());
  return wanted;
}

double MassScale(double temperature) { return kLog2E / temperature; }

double Octave(float logit, double scale) { return std::floor(Exponent(logit, scale)); }

uint64_t Mantissa(float logit, double scale) {
  const double y = Exponent(logit, scale);
  return MantissaOf(y - std::floor(y));
}

double RelativeMass(float logit, float max, double scale) {
  const double y = (static_cast<double>(logit) - max) * scale;
  if (!(y > -1000)) return 0;
  const double octave = std::floor(y);
  return std::ldexp(Exp2Fraction(y - octave), static_cast<int>(octave));
}

int MassBucket(float logit, double scale, double top_octave) {
  const double y = Exponent(logit, scale);
  const double octave = std::floor(y);
  return static_cast<int>(BucketOf(octave, y - octave, top_octave));
}

void FillMassHistogram(const LogitSlice& slice, double scale, double top_octave,
                       MassHistogram& histogram) {
  histogram = {};
  FillMassHistogramVectorised(slice, scale, top_octave, histogram);
}

void FillCellHistogram(const LogitSlice& slice, const KeyCells& cells, const Survivors& survivors,
                       double scale, CellHistogram& histogram) {
  histogram = {};
  FillCellHistogramVectorised(slice, cells, survivors, scale, histogram);
}

int64_t CollectRange(const LogitSlice& slice, uint32_t low, uint32_t high,
                     const Survivors& survivors, std::span<LogitAndId> out) {
  const float low_logit = FromOrderKey(low);
  size_t count = 0;
  for (int64_t begin = 0; begin < slice.size(); begin += kScanBlock) {
    if (slice.block_max[begin / kScanBlock] < low_logit) continue;
    const int64_t end = std::min(begin + kScanBlock, slice.size());
    for (int64_t i = begin; i < end; ++i) {
      const uint32_t key = OrderKey(slice.logits[i]);
      if (key < low || key > high || !survivors.Has(key, i)) continue;
      if (count == out.size()) return static_cast<int64_t>(count);
      out[count++] = {slice.logits[i], static_cast<int32_t>(slice.vocab.begin + i)};
    }
  }
  return static_cast<int64_t>(count);
}

int64_t FindTieEnd(const LogitSlice& slice, uint32_t key, int64_t count) {
  if (count <= 0) return 0;
  const float logit = FromOrderKey(key);
  for (int64_t begin = 0; begin < slice.size(); begin += kScanBlock) {
    if (slice.block_max[begin / kScanBlock] < logit) continue;
    const int64_t end = std::min(begin + kScanBlock, slice.size());
    for (int64_t i = begin; i < end; ++i) {
      if (slice.logits[i] == logit && --count == 0) return i + 1;
    }
  }
  return slice.size();
}

ExpSum SumExp(const LogitSlice& slice, float max) {
  ExpSum sum{.max = max};
  if (std::isnan(max) || max == kMinusInfinity) return sum;
  if (std::abs(max) >= kCoarse) {
    sum.tiers[0] =
        static_cast<uint64_t>(std::count(slice.logits, slice.logits + slice.size(), max));
  } else {
    SumExpVectorised(slice, TierOf(max), sum.tiers);
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
  double total = 0;
  for (int tier = kTiers - 1; tier >= 0; --tier) {
    total = total * std::ldexp(1.0, -kTierOctaves) + static_cast<double>(sum.tiers[tier]);
  }
  const double octave = TierOf(sum.max) * kTierOctaves - 32;
  return std::log(total) + (octave * kLn2 - sum.max);
}

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
