// What lies between the product that makes queries, keys and values, and attention: norm and
// rotation of heads, and the write of keys and values to the paged cache.
#include <cuda_fp8.h>

#include <algorithm>
#include <bit>
#include <type_traits>

#include "model/cuda_kernel.cuh"
#include "model/cuda_ops.h"

namespace lockstep {

namespace {

constexpr int kThreads = 256;  // at most, a block

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <typename T, typename Cache>
struct RopeArgs {
  T* qkv;
  int64_t stride;
  int num_query_heads;
  int num_kv_heads;
  int head_dim;
  int half;         // R/2
  int lane_bits;    // log2 of the lanes of a head
  int block_heads;  // of a block
  HeadNorm norm;
  const float* cos;
  const float* sin;
  const int32_t* rows;
  const int64_t* slots;
  Cache* keys;
  Cache* values;
  float k_scale;  // of an fp8 cache
  float v_scale;
  int block_size;   // P
  int block_shift;  // log2 of it; -1: no power of two
};

template <typename T, int kSize>
__device__ __forceinline__ Vector<float, kSize> LoadWide(const T* from) {
  const Vector<T, kSize> stored = LoadVector<kSize>(from);
  Vector<float, kSize> values;
#pragma unroll
  for (int i = 0; i < kSize; ++i) values.at[i] = Widen(stored.at[i]);
  return values;
}

template <typename T, int kSize>
__device__ __forceinline__ void StoreNarrow(const Vector<float, kSize>& values, float divisor,
                                            T* to) {
  Vector<T, kSize> stored;
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    if constexpr (std::is_same_v<T, __nv_fp8_e4m3>) {
      stored.at[i] = __nv_fp8_e4m3(values.at[i] / divisor);  // saturating; NaN stays NaN
    } else {
      stored.at[i] = Narrow<T>(values.at[i]);
    }
  }
  StoreVector(stored, to);
}

// The vectors of a head that a lane owns, and no other lane reads or writes: pairs half a rotation
// apart, and some of what does not turn.
template <typename Fn>
__device__ __forceinline__ void ForEachPair(int half, int first, int step, Fn fn) {
  for (int dim = first; dim < half; dim += step) fn(dim);
}
template <typename Fn>
__device__ __forceinline__ void ForEachRest(int half, int head_dim, int first, int step, Fn fn) {
  for (int dim = 2 * half + first; dim < head_dim; dim += step) fn(dim);
}

template <int kSize>
__device__ __forceinline__ float SquaresOf(const Vector<float, kSize>& values, float sum) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) sum = fmaf(values.at[i], values.at[i], sum);
  return sum;
}

// This lane's vectors of the head `from`, times scale * weight where there is one, turned by the
// angles of `row`, to `to`: the same place or another.
template <int kSize, typename Args, typename T, typename To>
__device__ __forceinline__ void TurnHead(const Args& args, const T* from, To* to,
                                         const float* weight, float scale, int64_t row, int first,
                                         int step) {
  const auto load = [&](int dim) {
    Vector<float, kSize> values = LoadWide<T, kSize>(from + dim);
    if (weight != nullptr) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) values.at[i] *= scale * weight[dim + i];
    }
    return values;
  };
  ForEachPair(args.half, first, step, [&](int dim) {
    const Vector<float, kSize> a = load(dim);
    const Vector<float, kSize> b = load(dim + args.half);
    const Vector<float, kSize> cos = LoadVector<kSize>(args.cos + row * args.half + dim);
    const Vector<float, kSize> sin = LoadVector<kSize>(args.sin + row * args.half + dim);
    Vector<float, kSize> turned_a, turned_b;
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      turned_a.at[i] = a.at[i] * cos.at[i] - b.at[i] * sin.at[i];
      turned_b.at[i] = b.at[i] * cos.at[i] + a.at[i] * sin.at[i];
    }
    StoreNarrow<To, kSize>(turned_a, args.k_scale, to + dim);
    StoreNarrow<To, kSize>(turned_b, args.k_scale, to + dim + args.half);
  });
  if (weight == nullptr && static_cast<const void*>(from) == static_cast<const void*>(to)) return;
  ForEachRest(args.half, args.head_dim, first, step,
              [&](int dim) { StoreNarrow<To, kSize>(load(dim), args.k_scale, to + dim); });
}

// 1 / sqrt(mean of squares + eps) of the head; 1 where there is no weight. All lanes of the warp
// come here, those without a head too.
template <int kSize, typename Args, typename T>
__device__ __forceinline__ float NormScale(const Args& args, const T* head, const float* weight,
                                           int first, int step) {
  float squares = 0;
  if (weight != nullptr) {
    const auto add = [&](int dim) {
      squares = SquaresOf<kSize>(LoadWide<T, kSize>(head + dim), squares);
    };
    ForEachPair(args.half, first, step, [&](int dim) {
      add(dim);
      add(dim + args.half);
    });
    ForEachRest(args.half, args.head_dim, first, step, add);
  }
  for (int lanes = 1 << args.lane_bits >> 1; lanes > 0; lanes /= 2) {
    squares += __shfl_xor_sync(~0u, squares, lanes);
  }
  if (weight == nullptr) return 1;
  return 1.0f / sqrtf(squares / static_cast<float>(args.head_dim) + args.norm.eps);
}

// Grid: tokens; block_heads heads each. 2^lane_bits lanes a head, in the order of qkv.
template <typename T, typename Cache, int kSize>
__global__ void __launch_bounds__(kThreads)
    NormRopeWriteKvKernel(const __grid_constant__ RopeArgs<T, Cache> args) {
  LetSuccessorStart();
  WaitForPredecessor();
  const int64_t token = blockIdx.x;
  const int64_t slot = args.slots[token];
  const int64_t row = args.rows == nullptr ? token : args.rows[token];
  const int step = kSize << args.lane_bits;
  const int first = (static_cast<int>(threadIdx.x) & ((1 << args.lane_bits) - 1)) * kSize;
  const int in_block = static_cast<int>(threadIdx.x) >> args.lane_bits;
  const int index = static_cast<int>(blockIdx.y) * args.block_heads + in_block;
  const int num_turning = args.num_query_heads + args.num_kv_heads;
  const bool active = in_block < args.block_heads && index < num_turning + args.num_kv_heads;
  const bool is_query = index < args.num_query_heads;
  const bool is_key = !is_query && index < num_turning;
  T* const head = args.qkv + token * args.stride + int64_t{index} * args.head_dim;

  const float* weight = nullptr;
  if (active && (is_query || is_key)) weight = is_query ? args.norm.q_weight : args.norm.k_weight;
  float scale = 1;
  if (args.norm.q_weight != nullptr || args.norm.k_weight != nullptr) {
    scale = NormScale<kSize>(args, head, weight, first, step);
  }
  if (!active) return;
  if (is_query) {
    TurnHead<kSize>(args, head, head, weight, scale, row, first, step);
    return;
  }
  if (slot < 0) return;
  const int64_t block = args.block_shift >= 0 ? slot >> args.block_shift : slot / args.block_size;
  const int kv_head = index - (is_key ? args.num_query_heads : num_turning);
  const int64_t to =
      ((block * args.num_kv_heads + kv_head) * args.block_size + (slot - block * args.block_size)) *
      args.head_dim;
  if (is_key) {
    TurnHead<kSize>(args, head, args.keys + to, weight, scale, row, first, step);
  } else {
    for (int dim = first; dim < args.head_dim; dim += step) {
      StoreNarrow<Cache, kSize>(LoadWide<T, kSize>(head + dim), args.v_scale,
                                args.values + to + dim);
    }
  }
}

// Of a block, as many heads as 256 threads take, evenly over the blocks of a token.
template <typename T, typename Cache, int kSize>
absl::Status LaunchNormRope(RopeArgs<T, Cache> args, int64_t tokens, const CudaContext& context) {
  // A lane a pair of vectors, or a vector where nothing turns.
  const int64_t units = CeilDiv(args.half > 0 ? args.half : args.head_dim, kSize);
  const int64_t lanes =
      std::clamp<int64_t>(static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(units))), 4, 32);
  const int64_t heads = args.num_query_heads + 2 * args.num_kv_heads;
  const int64_t blocks = CeilDiv(heads * lanes, kThreads);
  args.lane_bits = std::countr_zero(static_cast<uint64_t>(lanes));
  args.block_heads = static_cast<int>(CeilDiv(heads, blocks));
  const int threads = static_cast<int>(CeilDiv(args.block_heads * lanes, 32) * 32);
  return LaunchKernel("launch of RoPE and KV write", NormRopeWriteKvKernel<T, Cache, kSize>,
                      dim3(static_cast<unsigned>(tokens), static_cast<unsigned>(blocks)), threads,
                      0, {context.stream, context.programmatic_launch}, args);
}

}  // namespace

absl::Status NormRopeWriteKv(const MatrixView& qkv, int64_t num_query_heads, const HeadNorm& norm,
                             const RopeTable& rope, const int64_t* slots, const KvCacheView& cache,
                             const CudaContext& context) {
  const int64_t head_dim = cache.head_dim;
  const int64_t half = rope.rotary_dim / 2;
  LOCKSTEP_CHECK(num_query_heads >= 1 && cache.num_kv_heads >= 1 && cache.block_size >= 1);
  LOCKSTEP_CHECK(qkv.cols == (num_query_heads + 2 * cache.num_kv_heads) * head_dim);
  LOCKSTEP_CHECK(rope.rotary_dim % 2 == 0 && rope.rotary_dim >= 0 && rope.rotary_dim <= head_dim);
  if (qkv.rows == 0) return absl::OkStatus();
  const bool power_of_two = std::has_single_bit(static_cast<uint64_t>(cache.block_size));
  const int shift = power_of_two ? std::countr_zero(static_cast<uint64_t>(cache.block_size)) : -1;
  const auto run = [&](auto element, auto cache_element) {
    using T = decltype(element);
    using Cache = decltype(cache_element);
    constexpr int kSize = 16 / sizeof(T);
    const RopeArgs<T, Cache> args = {.qkv = static_cast<T*>(qkv.data),
                                     .stride = qkv.stride,
                                     .num_query_heads = static_cast<int>(num_query_heads),
                                     .num_kv_heads = static_cast<int>(cache.num_kv_heads),
                                     .head_dim = static_cast<int>(head_dim),
                                     .half = static_cast<int>(half),
                                     .lane_bits = 0,
                                     .block_heads = 0,
                                     .norm = norm,
                                     .cos = rope.cos,
                                     .sin = rope.sin,
                                     .rows = rope.rows,
                                     .slots = slots,
                                     .keys = static_cast<Cache*>(cache.keys),
                                     .values = static_cast<Cache*>(cache.values),
                                     .k_scale = cache.k_scale,
                                     .v_scale = cache.v_scale,
                                     .block_size = static_cast<int>(cache.block_size),
                                     .block_shift = shift};
    const bool aligned = RowsAligned16(qkv) && head_dim % kSize == 0 && half % kSize == 0 &&
                         (half == 0 || (IsAligned16(rope.cos) && IsAligned16(rope.sin))) &&
                         IsAligned16(cache.keys) && IsAligned16(cache.values);
    return aligned ? LaunchNormRope<T, Cache, kSize>(args, qkv.rows, context)
                   : LaunchNormRope<T, Cache, 1>(args, qkv.rows, context);
  };
  return WithElementType(qkv.dtype, [&](auto element) {
    if (cache.dtype == DType::kF8E4M3) return run(element, __nv_fp8_e4m3());
    return WithElementType(cache.dtype,
                           [&](auto cache_element) { return run(element, cache_element); });
  });
}

}  // namespace lockstep
