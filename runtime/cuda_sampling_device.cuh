// What the sampling kernels share. Included by files that are compiled with -fmad=false: what host
// code rounds twice is rounded twice here.
#pragma once

#include <cfloat>
#include <cstdint>

#include "runtime/cuda_sampling.h"
#include "runtime/random_bits.h"
#include "runtime/softmax_steps.h"

namespace lockstep {

inline constexpr unsigned kAllLanes = ~0u;

__device__ __forceinline__ float MinusInfinity() { return -INFINITY; }

// --- Order ---

// Larger score, then lower id; none (-1) is the highest id.
__device__ __forceinline__ bool BeatsScore(double score, int32_t id, double other_score,
                                           int32_t other_id) {
  return score > other_score ||
         (score == other_score && static_cast<uint32_t>(id) < static_cast<uint32_t>(other_id));
}
// As OrderKey and FromOrderKey.
__device__ __forceinline__ uint32_t KeyOf(float x) {
  const uint32_t bits = __float_as_uint(x + 0.0f);
  return (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float FromKey(uint32_t key) {
  return __uint_as_float((key >> 31) != 0 ? key & 0x7fffffffu : ~key);
}
// Larger for the better of two ids: larger logit, then lower id. 0: none.
__device__ __forceinline__ uint64_t RankOf(float logit, int32_t id) {
  return uint64_t{KeyOf(logit)} << 32 | ~static_cast<uint32_t>(id);
}
__device__ __forceinline__ float LogitOfRank(uint64_t rank) {
  return FromKey(static_cast<uint32_t>(rank >> 32));
}
__device__ __forceinline__ int32_t IdOfRank(uint64_t rank) {
  return static_cast<int32_t>(~static_cast<uint32_t>(rank));
}

// --- Noise ---

// As GumbelNoise.
inline __device__ __noinline__ double NoiseOf(uint64_t bits) {
  const double e = (static_cast<double>(bits >> 11) + 0.5) * 0x1p-53;
  return -log(-log1p(-e));
}
// At least NoiseOf; see GumbelBound in gumbel_race.cc.
__device__ __forceinline__ double NoiseBound(uint64_t bits) {
  const double e =
      __longlong_as_double(static_cast<long long>((bits >> 12) | 0x3ff0000000000000)) - 1.0;
  const double high = __hiloint2double(0x43300000, __double2hiint(e)) - 0x1p52;
  return (0x1p20 * 1023 - high) * (0.69314718055994530942 * 0x1p-20) + 1e-9;
}
__device__ __forceinline__ double ScoreOf(const DeviceRow& row, float logit, int32_t id) {
  return logit * row.inverse_temperature +
         NoiseOf(RandomBits(row.row_key, static_cast<uint64_t>(id)));
}

// --- Softmax mass, as softmax_mass.h ---

__device__ __forceinline__ double StepOf(float logit, double scale) { return floor(logit * scale); }
__device__ __forceinline__ uint64_t MantissaOf(float logit, double scale) {
  const double z = logit * scale;
  return __double2ull_rn(PowerWithinStep(z - floor(z)) * 0x1p28);
}
__device__ __forceinline__ int BucketOf(float logit, double scale, double top) {
  const double bucket = top - StepOf(logit, scale);
  return bucket < kMassBuckets ? static_cast<int>(bucket) : kMassBuckets;
}
__device__ __forceinline__ Mass UnitOf(int bucket, double top) {
  if (bucket == kMassBuckets) return 0;
  const double step = top - bucket;
  const double octave = floor(step / kStepsPerOctave);
  const double lowest = floor((top - kMassBuckets) / kStepsPerOctave);
  return Mass{StepUnit(static_cast<int>(step - octave * kStepsPerOctave))}
         << static_cast<int>(octave - lowest);
}
// Rounded to nearest even, as the host does.
__device__ __forceinline__ double ToDouble(Mass mass) {
  const auto high = static_cast<uint64_t>(mass >> 64);
  const auto low = static_cast<uint64_t>(mass);
  if (high == 0) return static_cast<double>(low);
  const int shift = 64 - __clzll(static_cast<long long>(high));  // 1 to 64
  const auto top = static_cast<uint64_t>(mass >> shift);
  const bool rest = (mass & ((Mass{1} << shift) - 1)) != 0;
  return ldexp(static_cast<double>(top | (rest ? 1u : 0u)), shift);
}
__device__ __forceinline__ double RelativeMassOf(float logit, float max, double scale) {
  const double z = (static_cast<double>(logit) - max) * scale;
  if (!(z > -8000)) return 0;
  const double step = floor(z);
  const double octave = floor(step / kStepsPerOctave);
  const int within = static_cast<int>(step - octave * kStepsPerOctave);
  return ldexp(PowerWithinStep(z - step) * StepPower(within), static_cast<int>(octave));
}
// The smallest key of [low, high] for which `holds`, which holds at high and, once true, stays so.
template <typename Predicate>
__device__ __forceinline__ uint32_t FirstKeyWhere(uint32_t low, uint32_t high,
                                                  const Predicate& holds) {
  while (low < high) {
    const uint32_t middle = low + (high - low) / 2;
    if (holds(FromKey(middle))) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}
__device__ __forceinline__ uint32_t MinPKeyOf(float max, double scale, double min_p) {
  return FirstKeyWhere(kLowestKey, KeyOf(max),
                       [&](float logit) { return RelativeMassOf(logit, max, scale) >= min_p; });
}

// --- Rows in memory ---

// The row in vectors of four that lie at multiples of 16 bytes: vector v holds the columns from
// 4 * v - lead on; those outside of the row read as -infinity.
struct RowVectors {
  const float* logits;
  int32_t size;
  int32_t lead;

  __device__ RowVectors(const float* row, int32_t count)
      : logits(row),
        size(count),
        lead(static_cast<int32_t>(reinterpret_cast<uintptr_t>(row) / sizeof(float) % 4)) {}
  __device__ int32_t count() const { return (lead + size + 3) / 4; }
  __device__ int32_t FirstColumn(int32_t v) const { return 4 * v - lead; }
  __device__ bool Holds(int32_t column) const { return column >= 0 && column < size; }
  // Vectors from `end` on read as -infinity, too.
  __device__ __forceinline__ void Load(int32_t v, int32_t end, float* x) const {
    const int32_t column = FirstColumn(v);
    if (v < end && column >= 0 && column + 4 <= size) {
      const float4 four = *reinterpret_cast<const float4*>(logits + column);
      x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
      return;
    }
    for (int i = 0; i < 4; ++i) {
      x[i] = v < end && Holds(column + i) ? logits[column + i] : MinusInfinity();
    }
  }
};
__device__ __forceinline__ RowVectors VectorsOf(const SamplingStep& step, const DeviceRow& row) {
  return {step.logits + row.logits_row * step.stride,
          static_cast<int32_t>(step.vocab.end - step.vocab.begin)};
}
struct VectorRange {
  int32_t begin;
  int32_t end;
};
__device__ __forceinline__ VectorRange PartOf(const RowVectors& vectors, int32_t part,
                                              int32_t num_parts) {
  const int32_t size = (vectors.count() + num_parts - 1) / num_parts;
  const int32_t begin = min(part * size, vectors.count());
  return {begin, min(begin + size, vectors.count())};
}

// By one thread of each kernel that may be the first of a step.
__device__ __forceinline__ void WriteHeader(const SamplingStep& step) {
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    reinterpret_cast<MessageHeader*>(step.message)->digest = step.digest;
  }
}

// The raw logit of a column that now holds `logit`; for all of a block, the same column.
// `found`: shared, free before and after.
__device__ __forceinline__ float BlockRawLogit(const SamplingStep& step, const DeviceRow& row,
                                               int32_t column, float logit, float* found) {
  if (threadIdx.x == 0) *found = logit;
  __syncthreads();
  for (int i = threadIdx.x; i < row.num_adjustments; i += blockDim.x) {
    const DeviceAdjustment& adjustment = step.adjustments[row.first_adjustment + i];
    if (adjustment.column == column) *found = adjustment.raw;
  }
  __syncthreads();
  const float raw = *found;
  __syncthreads();
  return raw;
}

// True in the block of a row's `num_blocks` that comes last, which sees what the others wrote.
// `is_last`: shared, free before and after.
__device__ __forceinline__ bool ArrivesLast(uint32_t* arrivals, int64_t num_blocks, bool* is_last) {
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    *is_last = atomicAdd(arrivals, 1u) == static_cast<uint32_t>(num_blocks - 1);
    if (*is_last) *arrivals = 0;
  }
  __syncthreads();
  const bool last = *is_last;
  __syncthreads();
  if (last) __threadfence();
  return last;
}

// --- Messages ---

__device__ __forceinline__ const std::byte* MessageOf(const SamplingResults& results,
                                                      int64_t rank) {
  return results.messages + rank * results.layout.bytes;
}
__device__ __forceinline__ const MessageHeader& HeaderOf(const SamplingResults& results,
                                                         int64_t rank) {
  return *reinterpret_cast<const MessageHeader*>(MessageOf(results, rank));
}
__device__ __forceinline__ const Candidate& BestOf(const SamplingResults& results, int64_t rank,
                                                   int64_t row) {
  return reinterpret_cast<const Candidate*>(MessageOf(results, rank) + sizeof(MessageHeader))[row];
}
__device__ __forceinline__ const Candidate* CandidatesOf(const SamplingResults& results,
                                                         int64_t rank, const DeviceRow& row) {
  return reinterpret_cast<const Candidate*>(MessageOf(results, rank) + results.layout.candidates) +
         row.first_candidate;
}
__device__ __forceinline__ void WriteToken(const SamplingResults& results, int64_t row_index,
                                           int32_t id, float raw) {
  results.tokens[row_index] = id;
  results.raws[row_index] = raw;
  results.last_tokens[results.rows[row_index].slot] = max(id, 0);
}

// --- Parts ---

__device__ __forceinline__ void Offer(RowPart& best, double score, int32_t id) {
  if (BeatsScore(score, id, best.score, best.id)) best.score = score, best.id = id;
}
__device__ __forceinline__ void Merge(RowPart& part, const RowPart& other) {
  Offer(part, other.score, other.id);
  part.max = fmaxf(part.max, other.max);
  part.bad |= other.bad;
}
__device__ __forceinline__ RowPart NoPart() {
  RowPart part;
  part.score = -INFINITY;
  part.max = MinusInfinity();
  return part;
}
__device__ __forceinline__ RowPart ReduceWarp(RowPart part) {
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    RowPart other;
    other.score = __shfl_xor_sync(kAllLanes, part.score, lanes);
    other.max = __shfl_xor_sync(kAllLanes, part.max, lanes);
    other.id = __shfl_xor_sync(kAllLanes, part.id, lanes);
    other.bad = __shfl_xor_sync(kAllLanes, part.bad, lanes);
    Merge(part, other);
  }
  return part;
}
// The same to all threads. warps: shared, [kWarps], a power of two up to 32; free before and after.
template <int kWarps>
__device__ __forceinline__ RowPart ReduceBlock(RowPart part, RowPart* warps) {
  part = ReduceWarp(part);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = part;
  __syncthreads();
  part = ReduceWarp(warps[threadIdx.x % kWarps]);
  __syncthreads();
  return part;
}
// Written by another block of this kernel.
__device__ __forceinline__ RowPart ReadPart(const RowPart* part) {
  RowPart read;
  read.score = __ldcg(&part->score);
  read.max = __ldcg(&part->max);
  read.id = __ldcg(&part->id);
  read.bad = __ldcg(&part->bad);
  return read;
}

// --- The Gumbel race ---

// What the lane's kCount logits x of columns with `ids` do to its best. `bar`: the best score of
// the warp so far, the same in all lanes. A score is computed only where its bound reaches the bar:
// first that of the lane's highest bound, which raises the bar for the others. All lanes take part;
// -infinity never wins.
template <int kCount>
__device__ __forceinline__ void RunRace(const DeviceRow& row, const float* x, const int32_t* ids,
                                        RowPart& best, double& bar) {
  double reach[kCount];
  double highest = -INFINITY;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const uint64_t bits = RandomBits(row.row_key, static_cast<uint64_t>(ids[i]));
    reach[i] = x[i] * row.inverse_temperature + NoiseBound(bits);
    if (!(x[i] >= -FLT_MAX)) reach[i] = -INFINITY;
    highest = fmax(highest, reach[i]);
  }
  if (!__any_sync(kAllLanes, highest >= bar && highest > -INFINITY)) return;
  double lane_bar = highest;
  for (int pass = 0; pass < 2; ++pass) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (!(reach[i] >= lane_bar) || reach[i] == -INFINITY) continue;
      Offer(best, ScoreOf(row, x[i], ids[i]), ids[i]);
      reach[i] = -INFINITY;
    }
    bar = best.score;
    for (int lanes = 16; lanes > 0; lanes /= 2) {
      bar = fmax(bar, __shfl_xor_sync(kAllLanes, bar, lanes));
    }
    lane_bar = bar;
  }
}

}  // namespace lockstep
