// Hopper's warpgroup matrix products (wgmma) and register redistribution. PTX ISA: "Asynchronous
// Warpgroup Level Matrix Multiply-Accumulate Instructions", "Matrix Descriptor Format". For sm_90a
// only.
//
// A warpgroup is 128 threads of 4 consecutive warps. Its products have 64 rows; warp w has rows 16w
// to 16w + 15 of them. Of thread lane = 4 * g + c of it, d[j][0], d[j][1] are row g, columns 8j +
// 2c and + 1, and d[j][2], d[j][3] the same columns of row g + 8.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace lockstep {

// ---- Operands in shared memory ------------------------------------------------------------------

// Operands lie in panels of 64 columns of 2 bytes: a row of a panel is 128 bytes, whose 16-byte
// pieces are permuted by the row's number ("128-byte swizzle"); panels begin at multiples of 1024
// bytes.
constexpr int kPanelColumns = 64;
constexpr int kPanelRowBytes = 128;
constexpr int kWgmmaRows = 64;     // of a product
constexpr int kWgmmaColumns = 16;  // that it multiplies

// Byte offset of piece `chunk` (8 elements) of a row in panels of `panel_bytes` each.
__device__ inline uint32_t PanelOffset(int row, int chunk, uint32_t panel_bytes) {
  return chunk / 8 * panel_bytes + row * kPanelRowBytes + (chunk % 8 ^ row % 8) * 16;
}

// Groups of 8 rows are `group_bytes` apart. `panel_bytes` counts where the product's columns run
// along the rows (V): from one panel to the next.
__device__ inline uint64_t PanelDescriptor(uint32_t address, uint32_t group_bytes,
                                           uint32_t panel_bytes) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  return kSwizzle128 | uint64_t{group_bytes / 16} << 32 | uint64_t{panel_bytes / 16} << 16 |
         (address & 0x3ffff) / 16;
}

// ---- Products -----------------------------------------------------------------------------------

// Before the first product, and after registers of one were written.
__device__ inline void WgmmaFence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void WgmmaCommit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Until at most kPending groups are under way.
template <int kPending>
__device__ inline void WgmmaWait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Keeps the compiler from moving what is done with the registers of a product, results or operands,
// across this place.
template <int kCount>
__device__ inline void PinRegisters(float (&d)[kCount][4]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) asm volatile("" : "+f"(d[i][j])::"memory");
  }
}

template <int kCount>
__device__ inline void PinRegisters(uint32_t (&a)[kCount][4]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) asm volatile("" : "+r"(a[i][j])::"memory");
  }
}

// clang-format off
#define LOCKSTEP_REGISTERS_4 "%0, %1, %2, %3"
#define LOCKSTEP_REGISTERS_8 LOCKSTEP_REGISTERS_4 ", %4, %5, %6, %7"
#define LOCKSTEP_REGISTERS_12 LOCKSTEP_REGISTERS_8 ", %8, %9, %10, %11"
#define LOCKSTEP_REGISTERS_16 LOCKSTEP_REGISTERS_12 ", %12, %13, %14, %15"
#define LOCKSTEP_REGISTERS_32 \
  LOCKSTEP_REGISTERS_16 ", " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define LOCKSTEP_REGISTERS_40 \
  LOCKSTEP_REGISTERS_32 ", " \
  "%32, %33, %34, %35, %36, %37, %38, %39"
#define LOCKSTEP_REGISTERS_48 \
  LOCKSTEP_REGISTERS_40 ", " \
  "%40, %41, %42, %43, %44, %45, %46, %47"
#define LOCKSTEP_REGISTERS_64 \
  LOCKSTEP_REGISTERS_48 ", " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define LOCKSTEP_REGISTERS_80 \
  LOCKSTEP_REGISTERS_64 ", " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define LOCKSTEP_REGISTERS_128 \
  LOCKSTEP_REGISTERS_64 ", " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define LOCKSTEP_OUT_4(d, i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define LOCKSTEP_OUT_8(d, i) LOCKSTEP_OUT_4(d, i), LOCKSTEP_OUT_4(d, i + 1)
#define LOCKSTEP_OUT_12(d, i) LOCKSTEP_OUT_8(d, i), LOCKSTEP_OUT_4(d, i + 2)
#define LOCKSTEP_OUT_16(d, i) LOCKSTEP_OUT_8(d, i), LOCKSTEP_OUT_8(d, i + 2)
#define LOCKSTEP_OUT_32(d, i) LOCKSTEP_OUT_16(d, i), LOCKSTEP_OUT_16(d, i + 4)
#define LOCKSTEP_OUT_40(d, i) LOCKSTEP_OUT_32(d, i), LOCKSTEP_OUT_8(d, i + 8)
#define LOCKSTEP_OUT_48(d, i) LOCKSTEP_OUT_32(d, i), LOCKSTEP_OUT_16(d, i + 8)
#define LOCKSTEP_OUT_64(d, i) LOCKSTEP_OUT_32(d, i), LOCKSTEP_OUT_32(d, i + 8)
#define LOCKSTEP_OUT_80(d, i) LOCKSTEP_OUT_64(d, i), LOCKSTEP_OUT_16(d, i + 16)
#define LOCKSTEP_OUT_128(d, i) LOCKSTEP_OUT_64(d, i), LOCKSTEP_OUT_64(d, i + 16)
// clang-format on

// 64 x kColumns += 64 x 16 times 16 x kColumns.
template <typename T, int kColumns>
struct Wgmma;

// %I0 and up: the operands after the COUNT = N / 2 results.
#define LOCKSTEP_DEFINE_WGMMA(T, TYPE, N, COUNT, I0, I1, I2, I3, I4, I5)                          \
  template <>                                                                                     \
  struct Wgmma<T, N> {                                                                            \
    /* a: 64 rows of 16, or fragments; b: N rows of 16. accumulate 0: the result is new. */       \
    static __device__ void MultiplyRows(float (&d)[N / 8][4], uint64_t a, uint64_t b,             \
                                        int accumulate) {                                         \
      asm volatile("{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %" #I2                     \
                   ", 0;\n"                                                                       \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE                \
                   " {" LOCKSTEP_REGISTERS_##COUNT "}, %" #I0 ", %" #I1                           \
                                                   ", accumulate, 1, 1, 0, 0;\n}"                 \
                   : LOCKSTEP_OUT_##COUNT(d, 0)                                                   \
                   : "l"(a), "l"(b), "r"(accumulate)                                              \
                   : "memory");                                                                   \
    }                                                                                             \
    static __device__ void MultiplyRows(float (&d)[N / 8][4], const uint32_t (&a)[4], uint64_t b, \
                                        int accumulate) {                                         \
      asm volatile("{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %" #I5                     \
                   ", 0;\n"                                                                       \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE                \
                   " {" LOCKSTEP_REGISTERS_##COUNT "}, {%" #I0 ", %" #I1 ", %" #I2 ", %" #I3      \
                                                   "}, %" #I4 ", accumulate, 1, 1, 0;\n}"         \
                   : LOCKSTEP_OUT_##COUNT(d, 0)                                                   \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate)          \
                   : "memory");                                                                   \
    }                                                                                             \
    /* a: fragments; b: 16 rows of N columns. */                                                  \
    static __device__ void MultiplyColumns(float (&d)[N / 8][4], const uint32_t (&a)[4],          \
                                           uint64_t b) {                                          \
      asm volatile(                                                                               \
          "{\n.reg .pred accumulate;\nsetp.eq.b32 accumulate, 0, 0;\n"                            \
          "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE                         \
          " {" LOCKSTEP_REGISTERS_##COUNT "}, {%" #I0 ", %" #I1 ", %" #I2 ", %" #I3 "}, %" #I4    \
                                          ", accumulate, 1, 1, 1;\n}"                             \
          : LOCKSTEP_OUT_##COUNT(d, 0)                                                            \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)                                    \
          : "memory");                                                                            \
    }                                                                                             \
  }
#define LOCKSTEP_DEFINE_WGMMAS(T, TYPE)                            \
  LOCKSTEP_DEFINE_WGMMA(T, TYPE, 8, 4, 4, 5, 6, 7, 8, 9);          \
  LOCKSTEP_DEFINE_WGMMA(T, TYPE, 16, 8, 8, 9, 10, 11, 12, 13);     \
  LOCKSTEP_DEFINE_WGMMA(T, TYPE, 24, 12, 12, 13, 14, 15, 16, 17);  \
  LOCKSTEP_DEFINE_WGMMA(T, TYPE, 32, 16, 16, 17, 18, 19, 20, 21);  \
  LOCKSTEP_DEFINE_WGMMA(T, TYPE, 64, 32, 32, 33, 34, 35, 36, 37);  \
  LOCKSTEP_DEFINE_WGMMA(T, TYPE, 80, 40, 40, 41, 42, 43, 44, 45);  \
  LOCKSTEP_DEFINE_WGMMA(T, TYPE, 96, 48, 48, 49, 50, 51, 52, 53);  \
  LOCKSTEP_DEFINE_WGMMA(T, TYPE, 128, 64, 64, 65, 66, 67, 68, 69); \
  LOCKSTEP_DEFINE_WGMMA(T, TYPE, 160, 80, 80, 81, 82, 83, 84, 85); \
  LOCKSTEP_DEFINE_WGMMA(T, TYPE, 256, 128, 128, 129, 130, 131, 132, 133)
LOCKSTEP_DEFINE_WGMMAS(__nv_bfloat16, "bf16");
LOCKSTEP_DEFINE_WGMMAS(__half, "f16");

// ---- Barriers -----------------------------------------------------------------------------------

// A barrier of one warpgroup; `id` from 1 to 15.
__device__ inline void SyncWarpgroup(int id) {
  __syncwarp();
  asm volatile("bar.sync %0, 128;" ::"r"(id) : "memory");
}

// ---- Registers ----------------------------------------------------------------------------------

template <int kRegisters>
__device__ inline void GiveRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ inline void TakeRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace lockstep
