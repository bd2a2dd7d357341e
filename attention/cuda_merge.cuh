// Adding the parts of a decode request that has several (flash decoding, Dao et al. 2023), in
// ascending order, by the block that finishes the last of them.
//
// Softmax by parts: of part s memory has its largest logit m_s (in units of log2(e)), the sum l_s
// of 2^(x - m_s) and the values weighted with them, a_s. With m = max m_s, the row is
// sum 2^(m_s - m) a_s / sum 2^(m_s - m) l_s.
#pragma once

#include "attention/cuda_device_code.cuh"

namespace lockstep {

static_assert(kMaxSplits == 64);

// Counts one more of `num_parts` parts and returns how many there were before; after the last one
// the counter is 0 again. By one thread, behind a barrier behind the block's stores. Of all blocks
// that count, the last one's threads may read what any of them stored, behind another barrier.
__device__ inline uint32_t CountPart(uint32_t* counter, int32_t num_parts) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(counter), "r"(num_parts - 1)
               : "memory");
  return before;
}

// Of a (request, query head), by a warp: weights of the parts from their maxima and sums, then the
// weighted sum of their values, a lane 4 columns of 128. The first parts' values are on their way
// while the weights are computed.
template <typename T>
__device__ void MergeHead(const DecodeParams& p, int32_t request, int32_t row, int32_t head,
                          int32_t num_splits) {
  constexpr int kAhead = 8;
  const int lane = threadIdx.x % 32;
  const int64_t partial = PartialRow(p, request, head);
  const float* const parts = p.partials + partial * p.kv.head_dim;
  float weights[kMaxSplits / 32];  // of splits lane, lane + 32
  float sums[kMaxSplits / 32];
  float max = -INFINITY;
#pragma unroll
  for (int j = 0; j < kMaxSplits / 32; ++j) {
    const int split = lane + 32 * j;
    float2 stats = make_float2(-INFINITY, 0);
    if (split < num_splits) {
      stats = __ldcg(reinterpret_cast<const float2*>(p.partial_stats + 2 * (partial + split)));
    }
    weights[j] = stats.x;
    sums[j] = stats.y;
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

#pragma unroll
  for (int j = 0; j < kMaxSplits / 32; ++j) max = fmaxf(max, weights[j]);
  for (int step = 16; step > 0; step /= 2) {
    max = fmaxf(max, __shfl_xor_sync(kFullWarp, max, step));
  }
  const float offset = max == -INFINITY ? 0.0f : max;
  float sum = 0;
#pragma unroll
  for (int j = 0; j < kMaxSplits / 32; ++j) {
    weights[j] = Exp2(weights[j] - offset);
    sum = fmaf(sums[j], weights[j], sum);
  }
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(kFullWarp, sum, step);
  const float inverse = p.kv.value_scale / sum;

  for (int32_t column = lane * 4; column - lane * 4 < p.kv.head_dim; column += 128) {
    float4 total = make_float4(0, 0, 0, 0);
    for (int32_t first_split = 0; first_split < num_splits; first_split += kAhead) {
      if (first_split > 0 || column != lane * 4) load(column, first_split);
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int32_t split = first_split + i;
        const float other = split < 32 ? weights[0] : weights[1];
        const float weight = __shfl_sync(kFullWarp, other, split % 32);
        if (split >= num_splits) continue;
        total.x = fmaf(values[i].x, weight, total.x);
        total.y = fmaf(values[i].y, weight, total.y);
        total.z = fmaf(values[i].z, weight, total.z);
        total.w = fmaf(values[i].w, weight, total.w);
      }
    }
    if (column >= p.kv.head_dim) continue;
    T* const out = static_cast<T*>(p.rows.out) + row * p.rows.out_stride +
                   int64_t{head} * p.kv.head_dim + column;
    *reinterpret_cast<uint2*>(out) = make_uint2(Pack<T>(total.x * inverse, total.y * inverse),
                                                Pack<T>(total.z * inverse, total.w * inverse));
  }
}

}  // namespace lockstep
