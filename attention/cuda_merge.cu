// Adds the parts of decode requests that have several, in ascending order. Launched right behind
// the decode kernel, to start early and wait for it.
//
// Softmax by parts: of part s the decode kernel left its largest logit m_s (in units of log2(e)),
// the sum l_s of 2^(x - m_s) and the values weighted with them, a_s. With m = max m_s, the row is
// sum 2^(m_s - m) a_s / sum 2^(m_s - m) l_s.
#include "attention/cuda_device_code.cuh"
#include "attention/cuda_launch.cuh"

namespace lockstep {
namespace {

static_assert(kMaxSplits == 64);

// A warp takes a (request, query head): weights of the parts from their maxima and sums, then the
// weighted sum of their values, a lane 4 columns.
template <typename T>
__global__ void __launch_bounds__(32 * kMergeWarps)
    MergeKernel(const __grid_constant__ DecodeParams p) {
  WaitForPredecessor();
  AllowSuccessor();
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const auto* const merges = reinterpret_cast<const DecodeMerge*>(p.plan + 1);
  const int32_t total = p.plan->num_merges * p.rows.num_query_heads;
  for (int32_t work = static_cast<int32_t>(blockIdx.x) * kMergeWarps + warp; work < total;
       work += static_cast<int32_t>(gridDim.x) * kMergeWarps) {
    const DecodeMerge merge = merges[work / p.rows.num_query_heads];
    const int32_t head = work % p.rows.num_query_heads;
    const int64_t partial = PartialRow(p, merge.request, head);
    float weights[kMaxSplits / 32];  // of splits lane, lane + 32
    float sums[kMaxSplits / 32];
    float max = -INFINITY;
#pragma unroll
    for (int j = 0; j < kMaxSplits / 32; ++j) {
      const int split = lane + 32 * j;
      float2 stats = make_float2(-INFINITY, 0);
      if (split < merge.num_splits) {
        stats = __ldcg(reinterpret_cast<const float2*>(p.partial_stats + 2 * (partial + split)));
      }
      weights[j] = stats.x;
      sums[j] = stats.y;
      max = fmaxf(max, stats.x);
    }
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
    const float inverse = 1.0f / sum;
    for (int32_t first = 0; first < p.kv.head_dim; first += 128) {
      const int32_t column = first + lane * 4;
      const bool valid = column < p.kv.head_dim;
      const float* const values = p.partials + partial * p.kv.head_dim + (valid ? column : 0);
      float4 total_values = make_float4(0, 0, 0, 0);
#pragma unroll 8
      for (int split = 0; split < merge.num_splits; ++split) {
        const float weight =
            __shfl_sync(kFullWarp, split < 32 ? weights[0] : weights[1], split % 32);
        const float4 value =
            __ldcg(reinterpret_cast<const float4*>(values + split * p.kv.head_dim));
        total_values.x = fmaf(value.x, weight, total_values.x);
        total_values.y = fmaf(value.y, weight, total_values.y);
        total_values.z = fmaf(value.z, weight, total_values.z);
        total_values.w = fmaf(value.w, weight, total_values.w);
      }
      if (!valid) continue;
      T* const out = static_cast<T*>(p.rows.out) + merge.row * p.rows.out_stride +
                     int64_t{head} * p.kv.head_dim + column;
      *reinterpret_cast<uint2*>(out) =
          make_uint2(Pack<T>(total_values.x * inverse, total_values.y * inverse),
                     Pack<T>(total_values.z * inverse, total_values.w * inverse));
    }
  }
}

}  // namespace

absl::Status LaunchMerge(const DecodeParams& params, DType dtype, int64_t num_blocks,
                         CudaStream stream) {
  LOCKSTEP_CHECK(dtype != DType::kF32);
  return LaunchKernel(dtype == DType::kF16 ? MergeKernel<__half> : MergeKernel<__nv_bfloat16>,
                      dim3(static_cast<unsigned>(num_blocks)), 32 * kMergeWarps, 0, params, true,
                      stream, "launch of the merge of decode attention");
}

}  // namespace lockstep
