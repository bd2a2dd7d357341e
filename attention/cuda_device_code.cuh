// Device code that the attention kernels share: fp8 caches, the way through the block tables.
#pragma once

#include <type_traits>

#include "attention/cuda_kernels.h"
#include "attention/cuda_tensor_core.cuh"

namespace lockstep {

// ---- Programmatic dependent launch --------------------------------------------------------------
//
// Both do nothing in an ordinary launch. Every kernel begins with AllowSuccessor and then
// WaitForPredecessor, in every block: it reads and writes nothing before, so what any kernel before
// it in the stream reads is not overwritten early, and each kernel's end means the end of all
// before.

__device__ inline void WaitForPredecessor() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ inline void AllowSuccessor() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// ---- fp8 caches ---------------------------------------------------------------------------------
//
// Tensor cores multiply what an fp8 cache holds as float16, which has all numbers of E4M3. Weights
// of the values are float16 then, too; so are queries, times a power of 2 that brings the row's
// largest to [2^14, 2^15), which leaves every bit of a bfloat16 that matters beside it.

template <typename Cache>
constexpr bool kIsFp8 = std::is_same_v<Cache, __nv_fp8_e4m3>;

// What the products of queries of T with a cache of Cache are made of.
template <typename T, typename Cache>
using ProductType = std::conditional_t<kIsFp8<Cache>, __half, T>;

// Bytes 0 and 1 to the two halves of `low`, 2 and 3 to those of `high`.
__device__ inline void WidenFp8(uint32_t four, uint32_t& low, uint32_t& high) {
  asm("{\n\t.reg .b16 l, h;\n\tmov.b32 {l, h}, %2;\n\t"
      "cvt.rn.f16x2.e4m3x2 %0, l;\n\tcvt.rn.f16x2.e4m3x2 %1, h;\n\t}"
      : "=r"(low), "=r"(high)
      : "r"(four));
}

// Of a transposed 8 x 8 matrix of pairs of fp8: the first of both pairs to `even`, the second to
// `odd`.
__device__ inline void WidenFp8Pairs(uint32_t pairs, uint32_t& even, uint32_t& odd) {
  WidenFp8(__byte_perm(pairs, 0, 0x3120), even, odd);
}

// 2^e for a row whose largest magnitude is given (see above), and 2^-e.
struct QueryScale {
  float up;
  float down;

  __device__ explicit QueryScale(float largest) {
    const int exponent = static_cast<int>(__float_as_uint(largest) >> 23 & 0xff) - 127;
    const int e = min(14 - exponent, 126);
    up = __uint_as_float(static_cast<uint32_t>(127 + e) << 23);
    down = __uint_as_float(static_cast<uint32_t>(127 - e) << 23);
  }
};

// Two neighbours of a row of queries as float16, times `up`; unchanged where they are float16.
template <typename T>
__device__ inline uint32_t QueryPair(uint32_t pair, float up);
template <>
__device__ inline uint32_t QueryPair<__half>(uint32_t pair, float) {
  return pair;
}
template <>
__device__ inline uint32_t QueryPair<__nv_bfloat16>(uint32_t pair, float up) {
  uint32_t packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;"
      : "=r"(packed)
      : "f"(__uint_as_float(pair & 0xffff0000u) * up), "f"(__uint_as_float(pair << 16) * up));
  return packed;
}
// The larger magnitude of the two; 0 where it is not needed.
template <typename T>
__device__ inline float LargerOfPair(uint32_t pair) {
  if constexpr (std::is_same_v<T, __half>) return 0;
  return fmaxf(fabsf(__uint_as_float(pair & 0xffff0000u)), fabsf(__uint_as_float(pair << 16)));
}

// ---- Paged cache --------------------------------------------------------------------------------

// Row index in keys and values of position `key`; `table` is the request's.
__device__ inline int32_t RowIndex(const PagedKv& kv, const int32_t* table, int32_t key,
                                   int32_t kv_head) {
  const int32_t block = kv.block_shift >= 0 ? key >> kv.block_shift : key / kv.block_size;
  return (table[block] * kv.num_kv_heads + kv_head) * kv.block_size + (key - block * kv.block_size);
}

// Row of partials of (request, head), of which each split has head_dim floats.
__device__ inline int64_t PartialRow(const DecodeParams& p, int32_t request, int32_t head) {
  return (int64_t{request} * p.rows.num_query_heads + head) * p.max_splits;
}

// Rows [first, T) of out become zero; `thread` of `num_threads` in the grid. Rows are multiples of
// 16 bytes where T is a 2-byte type.
template <typename T>
__device__ void ZeroRows(const AttentionRows& rows, int32_t head_dim, int32_t first, int64_t thread,
                         int64_t num_threads) {
  if (first >= rows.num_tokens) return;
  const int64_t width = int64_t{rows.num_query_heads} * head_dim;
  const int64_t count = (rows.num_tokens - first) * width;
  for (int64_t i = thread; i < count; i += num_threads) {
    static_cast<T*>(rows.out)[(first + i / width) * rows.out_stride + i % width] =
        FromFloat<T>(0.0f);
  }
}

}  // namespace lockstep
