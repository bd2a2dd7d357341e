// Device code that the attention kernels share: tensor-core products, asynchronous copies, the way
// through the block tables.
//
// Fragments of mma.m16n8k16 (PTX ISA, "Matrix Fragments for mma.m16n8k16"), lane = 4 * g + c:
//   A, 16 x 16: [0] row g, columns 2c, 2c+1; [1] row g+8; [2] row g, columns 2c+8, 2c+9; [3] row
//   g+8 B, 16 x 8:  [0] rows 2c, 2c+1 of column g; [1] rows 2c+8, 2c+9 C, 16 x 8:  [0], [1] row g,
//   columns 2c, 2c+1; [2], [3] row g+8
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <type_traits>

#include "attention/cuda_kernels.h"

namespace lockstep {

constexpr unsigned kFullWarp = 0xffffffffu;

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

// ---- Element types ------------------------------------------------------------------------------

__device__ inline float AsFloat(float x) { return x; }
__device__ inline float AsFloat(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline float AsFloat(__half x) { return __half2float(x); }
__device__ inline float AsFloat(__nv_fp8_e4m3 x) { return static_cast<float>(x); }

template <typename T>
__device__ T FromFloat(float x);
template <>
__device__ inline float FromFloat<float>(float x) {
  return x;
}
template <>
__device__ inline __nv_bfloat16 FromFloat<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ inline __half FromFloat<__half>(float x) {
  return __float2half_rn(x);
}

// Saturating; NaN stays NaN.
template <>
__device__ inline __nv_fp8_e4m3 FromFloat<__nv_fp8_e4m3>(float x) {
  return __nv_fp8_e4m3(x);
}

// `low` in the lower half.
template <typename T>
__device__ inline uint32_t Pack(float low, float high);
template <>
__device__ inline uint32_t Pack<__nv_bfloat16>(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
template <>
__device__ inline uint32_t Pack<__half>(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
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

// ---- Tensor cores -------------------------------------------------------------------------------

template <typename T>
__device__ inline void Mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <>
__device__ inline void Mma<__nv_bfloat16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                          uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ inline void Mma<__half>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                   uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ inline uint32_t SharedAddress(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Four 8 x 8 matrices of 2-byte elements; lane l gives the address of row l % 8 of matrix l / 8.
__device__ inline void LoadMatrices(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ inline void LoadMatricesTransposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// Byte offset of this lane's address for LoadMatrices, in a tile whose rows are `row_bytes` apart.
// A 16 x 16 A fragment of row-major rows, and (transposed) two B fragments of 16 rows by 16
// columns.
__device__ inline uint32_t LaneOffsetRowsFirst(int lane, int row_bytes) {
  return (lane % 16) * row_bytes + (lane / 16) * 16;
}
// Two B fragments of 16 x 8 whose columns are the tile's rows: rows 0 to 7 first, then 8 to 15.
__device__ inline uint32_t LaneOffsetColumnsFirst(int lane, int row_bytes) {
  return ((lane / 16) * 8 + lane % 8) * row_bytes + ((lane / 8) % 2) * 16;
}

// ---- Asynchronous copies ------------------------------------------------------------------------

// 16 bytes, or zeros where `valid` is false (nothing is read then).
__device__ inline void CopyAsync16(uint32_t to_shared, const void* from, bool valid) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to_shared), "l"(from),
               "r"(bytes)
               : "memory");
}
__device__ inline void CommitCopies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until at most kPending of this thread's groups are under way.
template <int kPending>
__device__ inline void WaitForCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// ---- Softmax ------------------------------------------------------------------------------------

// 2^x; 1 for 0 and 0 for -infinity, exactly.
__device__ inline float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// cap_output * tanh(...): see LogitScale. 1 - 2 / (1 + 2^y) is tanh(y / (2 log2(e))).
__device__ inline float Capped(const LogitScale& scale, float s) {
  return scale.cap_output * (1.0f - __fdividef(2.0f, 1.0f + Exp2(s * scale.cap_input)));
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
