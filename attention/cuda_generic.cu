// Attention in plain float32 arithmetic, for any dtype and head_dim, decode and prefill rows alike:
// for checks against other devices, and for shapes the tensor-core kernels do not have. Slow.
//
// A block is one (row, query head). Keys go in tiles of 32 at multiples of 32, tile i to warp i mod
// 4; lane j has key j's logit, one chain of products over d. Then each lane adds the weighted
// values of its columns, keys ascending, and the warps' results are added in order. A row's bits
// depend on its own position and window only, and keys it does not see are never read.
#include "attention/cuda_device_code.cuh"
#include "attention/cuda_launch.cuh"

namespace lockstep {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kKeys = 32;
constexpr int kColumns = kMaxHeadDim / 32;  // of a lane

struct GenericParams {
  PrefillParams base;
  float scale;    // of a product of a query with what is stored of a key
  float softcap;  // 0: none
};

struct Row {
  int32_t request = -1;
  int32_t position = 0;
};

__device__ Row FindRow(const PrefillParams& p, int32_t token) {
  __shared__ int32_t found;
  if (threadIdx.x == 0) found = -1;
  __syncthreads();
  for (int32_t b = threadIdx.x; b < p.num_requests; b += kThreads) {
    if (p.query_start_loc[b] <= token && token < p.query_start_loc[b + 1]) found = b;
  }
  __syncthreads();
  Row row;
  row.request = found;
  if (found < 0) return row;
  row.position = p.seq_lens[found] - (p.query_start_loc[found + 1] - token);
  if (row.position < 0) row.request = -1;  // a padding request
  return row;
}

struct WarpResult {
  float max[kWarps];
  float sum[kWarps];
  float acc[kWarps][kMaxHeadDim];
};

template <typename Cache>
__device__ void AttendKeys(const GenericParams& p, const Row& row, int32_t kv_head,
                           const float* query, WarpResult& result) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const PagedKv& kv = p.base.kv;
  const int64_t table_row =
      p.base.table_rows != nullptr ? p.base.table_rows[row.request] : row.request;
  const int32_t* const table = kv.block_tables + table_row * kv.max_blocks;
  const int32_t window = p.base.window;
  const int32_t lowest = window > 0 && row.position >= window ? row.position - window + 1 : 0;
  float max = -INFINITY;
  float sum = 0;
  float acc[kColumns] = {};
  for (int32_t first = (lowest / kKeys / kWarps * kWarps + warp) * kKeys; first <= row.position;
       first += kKeys * kWarps) {
    const int32_t begin = ::max(first, lowest);
    const int32_t end = min(first + kKeys, row.position + 1);
    if (begin >= end) continue;
    const int32_t key = first + lane;
    const bool visible = key >= begin && key < end;
    const int32_t cache_row = visible ? RowIndex(kv, table, key, kv_head) : 0;
    float logit = -INFINITY;
    if (visible) {
      const Cache* const k = static_cast<const Cache*>(kv.keys) + int64_t{cache_row} * kv.head_dim;
      float product = 0;
      for (int32_t d = 0; d < kv.head_dim; ++d) product = fmaf(query[d], AsFloat(k[d]), product);
      logit = product * p.scale;
      if (p.softcap != 0) logit = p.softcap * tanhf(logit / p.softcap);
    }
    float tile_max = logit;
    for (int step = 16; step > 0; step /= 2) {
      tile_max = fmaxf(tile_max, __shfl_xor_sync(kFullWarp, tile_max, step));
    }
    const float new_max = fmaxf(max, tile_max);
    const float offset = new_max == -INFINITY ? 0.0f : new_max;
    const float shrink = expf(max - offset);
    const float weight = visible ? expf(logit - offset) : 0.0f;
    float tile_sum = weight;
    for (int step = 16; step > 0; step /= 2) {
      tile_sum += __shfl_xor_sync(kFullWarp, tile_sum, step);
    }
    max = new_max;
    sum = fmaf(sum, shrink, tile_sum);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) acc[i] *= shrink;
    for (int32_t j = begin - first; j < end - first; ++j) {
      const float w = __shfl_sync(kFullWarp, weight, j);
      const int64_t from = int64_t{__shfl_sync(kFullWarp, cache_row, j)} * kv.head_dim;
      const Cache* const v = static_cast<const Cache*>(kv.values) + from;
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        const int32_t d = lane + 32 * i;
        if (d < kv.head_dim) acc[i] = fmaf(w, AsFloat(v[d]), acc[i]);
      }
    }
  }
  if (lane == 0) {
    result.max[warp] = max;
    result.sum[warp] = sum;
  }
#pragma unroll
  for (int i = 0; i < kColumns; ++i) result.acc[warp][lane + 32 * i] = acc[i];
}

template <typename T, typename Cache>
__global__ void __launch_bounds__(kThreads) GenericKernel(const __grid_constant__ GenericParams p) {
  __shared__ float query[kMaxHeadDim];
  __shared__ WarpResult result;
  AllowSuccessor();
  WaitForPredecessor();
  const int32_t token = static_cast<int32_t>(blockIdx.x);
  const int32_t head = static_cast<int32_t>(blockIdx.y);
  const int32_t dim = p.base.kv.head_dim;
  T* const out =
      static_cast<T*>(p.base.rows.out) + token * p.base.rows.out_stride + int64_t{head} * dim;
  const Row row = FindRow(p.base, token);
  if (row.request < 0) {
    for (int32_t d = threadIdx.x; d < dim; d += kThreads) out[d] = FromFloat<T>(0.0f);
    return;
  }
  const T* const from = static_cast<const T*>(p.base.rows.query) +
                        token * p.base.rows.query_stride + int64_t{head} * dim;
  for (int32_t d = threadIdx.x; d < dim; d += kThreads) query[d] = AsFloat(from[d]);
  __syncthreads();
  int32_t kv_head = 0;
  while (head >= p.base.first_head[kv_head + 1]) ++kv_head;
  AttendKeys<Cache>(p, row, kv_head, query, result);
  __syncthreads();
  float max = -INFINITY;
  for (int w = 0; w < kWarps; ++w) max = fmaxf(max, result.max[w]);
  const float offset = max == -INFINITY ? 0.0f : max;
  for (int32_t d = threadIdx.x; d < dim; d += kThreads) {
    float value = 0;
    float sum = 0;
    for (int w = 0; w < kWarps; ++w) {
      const float weight = expf(result.max[w] - offset);
      value = fmaf(result.acc[w][d], weight, value);
      sum = fmaf(result.sum[w], weight, sum);
    }
    out[d] = FromFloat<T>(value / sum * p.base.kv.value_scale);
  }
}

template <typename T, typename Cache>
absl::Status Launch(const GenericParams& p, bool programmatic, CudaStream stream) {
  const dim3 grid(static_cast<unsigned>(p.base.rows.num_tokens),
                  static_cast<unsigned>(p.base.rows.num_query_heads));
  return LaunchKernel(GenericKernel<T, Cache>, grid, kThreads, 0, p, programmatic, stream,
                      "launch of float32 attention");
}

template <typename T>
absl::Status LaunchOf(const GenericParams& p, DType cache, bool programmatic, CudaStream stream) {
  return cache == DType::kF8E4M3 ? Launch<T, __nv_fp8_e4m3>(p, programmatic, stream)
                                 : Launch<T, T>(p, programmatic, stream);
}

}  // namespace

absl::Status LaunchGeneric(const PrefillParams& params, float scale, float softcap,
                           AttentionTypes types, bool programmatic, CudaStream stream) {
  const GenericParams p = {.base = params, .scale = scale, .softcap = softcap};
  LOCKSTEP_CHECK(types.cache == types.activations || types.cache == DType::kF8E4M3);
  switch (types.activations) {
    case DType::kF32:
      return LaunchOf<float>(p, types.cache, programmatic, stream);
    case DType::kF16:
      return LaunchOf<__half>(p, types.cache, programmatic, stream);
    case DType::kBF16:
      return LaunchOf<__nv_bfloat16>(p, types.cache, programmatic, stream);
    case DType::kF8E4M3:
      break;
  }
  LOCKSTEP_CHECK(false);
}

}  // namespace lockstep
