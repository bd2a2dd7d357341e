// Hopper's warpgroup products (PTX ISA, "wgmma.mma_async") of 64 rows of W with a few rows of x,
// both in shared memory. For sm_90a only.
//
// A warpgroup is 128 threads of 4 consecutive warps; warp w has rows 16w to 16w + 15 of the result.
// Of thread lane = 4 * g + c of it, d[j][0], d[j][1] are row g, columns 8j + 2c and + 1 and
// d[j][2], d[j][3] the same columns of row g + 8.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace lockstep {

// Operands lie in panels of 64 columns of 2 bytes: a row of a panel is 128 bytes, whose 16-byte
// pieces are permuted by the row's number mod 8 ("128-byte swizzle"); panels begin at multiples of
// 1024 bytes. Both operands run along K.
constexpr int kPanelCols = 64;
constexpr int kPanelRowBytes = 128;
constexpr int kWgmmaRows = 64;
constexpr int kWgmmaCols = 16;  // of K

// `address`: of a panel's row, a multiple of 8, plus the bytes of the columns before.
__device__ __forceinline__ uint64_t PanelDescriptor(uint32_t address) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  constexpr uint64_t kEightRows = uint64_t{8 * kPanelRowBytes / 16} << 32;
  constexpr uint64_t kUnused = uint64_t{1} << 16;
  return kSwizzle128 | kEightRows | kUnused | (address & 0x3ffff) / 16;
}

// Before the first product, and after registers of one were touched.
__device__ __forceinline__ void WgmmaFence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void WgmmaCommit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Until at most kPending groups are under way.
template <int kPending>
__device__ __forceinline__ void WgmmaWait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// d[64, kColumns] += a[64, 16] * b[kColumns, 16]^T; 0: d is new.
template <typename T, int kColumns>
struct SkinnyWgmma;

// clang-format off
#define LOCKSTEP_WGMMA_REGISTERS_4 "%0, %1, %2, %3"
#define LOCKSTEP_WGMMA_REGISTERS_8 LOCKSTEP_WGMMA_REGISTERS_4 ", %4, %5, %6, %7"
#define LOCKSTEP_WGMMA_REGISTERS_12 LOCKSTEP_WGMMA_REGISTERS_8 ", %8, %9, %10, %11"
#define LOCKSTEP_WGMMA_REGISTERS_16 LOCKSTEP_WGMMA_REGISTERS_12 ", %12, %13, %14, %15"
#define LOCKSTEP_WGMMA_OUT_4(d, i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define LOCKSTEP_WGMMA_OUT_8(d, i) LOCKSTEP_WGMMA_OUT_4(d, i), LOCKSTEP_WGMMA_OUT_4(d, i + 1)
#define LOCKSTEP_WGMMA_OUT_12(d, i) LOCKSTEP_WGMMA_OUT_8(d, i), LOCKSTEP_WGMMA_OUT_4(d, i + 2)
#define LOCKSTEP_WGMMA_OUT_16(d, i) LOCKSTEP_WGMMA_OUT_8(d, i), LOCKSTEP_WGMMA_OUT_8(d, i + 2)
// clang-format on

// %A, %B, %ADD: the operands after the COUNT = N / 2 results.
#define LOCKSTEP_DEFINE_SKINNY_WGMMA(T, TYPE, N, COUNT, A, B, ADD)                           \
  template <>                                                                                \
  struct SkinnyWgmma<T, N> {                                                                 \
    static __device__ __forceinline__ void Add(float (&d)[N / 8][4], uint64_t a, uint64_t b, \
                                               int accumulate) {                             \
      asm volatile("{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %" #ADD               \
                   ", 0;\n"                                                                  \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE           \
                   " {" LOCKSTEP_WGMMA_REGISTERS_##COUNT "}, %" #A ", %" #B                  \
                                                         ", accumulate, 1, 1, 0, 0;\n}"      \
                   : LOCKSTEP_WGMMA_OUT_##COUNT(d, 0)                                        \
                   : "l"(a), "l"(b), "r"(accumulate)                                         \
                   : "memory");                                                              \
    }                                                                                        \
  }
#define LOCKSTEP_DEFINE_SKINNY_WGMMAS(T, TYPE)               \
  LOCKSTEP_DEFINE_SKINNY_WGMMA(T, TYPE, 8, 4, 4, 5, 6);      \
  LOCKSTEP_DEFINE_SKINNY_WGMMA(T, TYPE, 16, 8, 8, 9, 10);    \
  LOCKSTEP_DEFINE_SKINNY_WGMMA(T, TYPE, 24, 12, 12, 13, 14); \
  LOCKSTEP_DEFINE_SKINNY_WGMMA(T, TYPE, 32, 16, 16, 17, 18)
LOCKSTEP_DEFINE_SKINNY_WGMMAS(__nv_bfloat16, "bf16");
LOCKSTEP_DEFINE_SKINNY_WGMMAS(__half, "f16");

}  // namespace lockstep
