// What device code of attention is made of, alone and inside larger kernels: element types,
// tensor-core products, asynchronous copies.
//
// Fragments of mma.m16n8k16 (PTX ISA, "Matrix Fragments for mma.m16n8k16"), lane = 4 * g + c:
//   A, 16 x 16: [0] row g, columns 2c, 2c+1; [1] row g+8; [2] row g, columns 2c+8, 2c+9; [3] row
//   g+8 B, 16 x 8:  [0] rows 2c, 2c+1 of column g; [1] rows 2c+8, 2c+9 C, 16 x 8:  [0], [1] row g,
//   columns 2c, 2c+1; [2], [3] row g+8
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "attention/cuda_kernels.h"
#include "runtime/core/cuda_async_copy.cuh"

namespace lockstep {

constexpr unsigned kFullWarp = 0xffffffffu;

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

}  // namespace lockstep
