// Adding the parts of a decode request that has several (flash decoding, Dao et al. 2023), in
// ascending order, by the block that finishes the last of them.
//
// Softmax by parts: of part s there are its largest logit m_s (in units of log2(e)), the sum l_s of
// 2^(x - m_s) and the values weighted with them, a_s. Parts 0 to s together have m = max(m', m_s),
// l = 2^(m' - m) l' + 2^(m_s - m) l_s and likewise a, from what parts 0 to s - 1 have. Who adds
// them up, one block that had them all (PartsSoFar) or a warp from memory (MergeHead), does the
// same operations.
#pragma once

#include "attention/cuda_device_code.cuh"

namespace lockstep {

static_assert(kMaxSplits == 64);

// Counts one more of `num_runs` runs and returns how many there were before; after the last one
// the counter is 0 again. By one thread, behind a barrier behind the block's stores. Of all blocks
// that count, the last one's threads may read what any of them stored, behind another barrier.
__device__ inline uint32_t CountRun(uint32_t* counter, int32_t num_runs) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(counter), "r"(num_runs - 1)
               : "memory");
  return before;
}

// What the two sides of the sum above are multiplied with.
struct PartWeights {
  float before;
  float part;

  PartWeights() = default;
  __device__ PartWeights(float max_before, float max, float part_max) {
    const float offset = max == -INFINITY ? 0.0f : max;
    before = Exp2(max_before - offset);
    part = Exp2(part_max - offset);
  }
};

__device__ inline float AddPart(float before, float part, const PartWeights& weights) {
  return fmaf(part, weights.part, before * weights.before);
}
__device__ inline float4 AddPart(const float4& before, const float4& part,
                                 const PartWeights& weights) {
  return make_float4(AddPart(before.x, part.x, weights), AddPart(before.y, part.y, weights),
                     AddPart(before.z, part.z, weights), AddPart(before.w, part.w, weights));
}

// 4 columns of a head.
struct PartsSoFar {
  float max;
  float sum;
  float4 values;

  __device__ void Reset() {
    max = -INFINITY;
    sum = 0;
    values = make_float4(0, 0, 0, 0);
  }
  __device__ void Add(const PartsSoFar& part) {
    const float both = fmaxf(max, part.max);
    const PartWeights weights(max, both, part.max);
    max = both;
    sum = AddPart(sum, part.sum, weights);
    values = AddPart(values, part.values, weights);
  }
};

// 4 columns of the output.
template <typename T>
__device__ void StoreOutput(const DecodeParams& p, int32_t row, int32_t head, int32_t column,
                            const float4& values, float scale) {
  T* const out = static_cast<T*>(p.rows.out) + row * p.rows.out_stride +
                 int64_t{head} * p.kv.head_dim + column;
  *reinterpret_cast<uint2*>(out) = make_uint2(Pack<T>(values.x * scale, values.y * scale),
                                              Pack<T>(values.z * scale, values.w * scale));
}

// Of a (request, query head), by a warp: weights of the parts from their maxima, then the weighted
// sum of their values, a lane 4 columns of 128. The first parts' values are on their way while the
// weights are computed.
template <typename T>
__device__ void MergeHead(const DecodeParams& p, int32_t request, int32_t row, int32_t head,
                          int32_t num_splits) {
  constexpr int kAhead = 8;
  constexpr int kHalves = kMaxSplits / 32;  // of the splits: lane, lane + 32
  const int lane = threadIdx.x % 32;
  const int64_t partial = PartialRow(p, request, head);
  const float* const parts = p.partials + partial * p.kv.head_dim;
  float2 stats[kHalves];
#pragma unroll
  for (int j = 0; j < kHalves; ++j) {
    const int split = lane + 32 * j;
    stats[j] = make_float2(-INFINITY, 0);
    if (split >= num_splits) continue;
    stats[j] = __ldcg(reinterpret_cast<const float2*>(p.partial_stats + 2 * (partial + split)));
  }
  float4 values[kAhead];
  const auto load = [&](int32_t column, int32_t first_split) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      values[i] = make_float4(0, 0, 0, 0);
      if (first_split + i >= num_splits || column >= p.kv.head_dim) continue;
      values[i] = __ldcg(reinterpret_cast<const float4*>(
          parts + int64_t{first_split + i} * p.kv.head_dim + column));
    }
  };
  load(lane * 4, 0);

  float before[kHalves];  // weights
  float part[kHalves];
  float max = -INFINITY;  // of the splits before the half
#pragma unroll
  for (int j = 0; j < kHalves; ++j) {
    float its_max = fmaxf(max, stats[j].x);  // of splits up to this lane's
    for (int step = 1; step < 32; step *= 2) {
      const float other = __shfl_up_sync(kFullWarp, its_max, step);
      if (lane >= step) its_max = fmaxf(its_max, other);
    }
    const float left = __shfl_up_sync(kFullWarp, its_max, 1);
    const PartWeights weights(lane == 0 ? max : left, its_max, stats[j].x);
    before[j] = weights.before;
    part[j] = weights.part;
    max = __shfl_sync(kFullWarp, its_max, 31);
  }

  for (int32_t column = lane * 4; column - lane * 4 < p.kv.head_dim; column += 128) {
    float sum = 0;
    float4 total = make_float4(0, 0, 0, 0);
    for (int32_t first_split = 0; first_split < num_splits; first_split += kAhead) {
      if (first_split > 0 || column != lane * 4) load(column, first_split);
      const int half = first_split / 32;
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int32_t split = first_split + i;
        PartWeights weights;
        weights.before = __shfl_sync(kFullWarp, half == 0 ? before[0] : before[1], split % 32);
        weights.part = __shfl_sync(kFullWarp, half == 0 ? part[0] : part[1], split % 32);
        const float its_sum =
            __shfl_sync(kFullWarp, half == 0 ? stats[0].y : stats[1].y, split % 32);
        if (split >= num_splits) continue;
        sum = AddPart(sum, its_sum, weights);
        total = AddPart(total, values[i], weights);
      }
    }
    if (column >= p.kv.head_dim) continue;
    StoreOutput<T>(p, row, head, column, total, p.kv.value_scale / sum);
  }
}

}  // namespace lockstep
