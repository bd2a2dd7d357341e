// Vectors of the instruction set a translation unit is compiled for: LOCKSTEP_KERNEL_WIDTH float
// lanes (4, 8, 16), loads from the cache's element types, and a transposition. For
// cpu_kernels_impl.h only, whose rules hold here.
#pragma once

#include <cstdint>

#include "runtime/core/dtype.h"

#if LOCKSTEP_KERNEL_WIDTH > 4
#include <immintrin.h>
#endif

namespace lockstep {
namespace {

constexpr int kWidth = LOCKSTEP_KERNEL_WIDTH;
typedef float Vec __attribute__((vector_size(kWidth * 4)));
typedef float UnalignedVec __attribute__((vector_size(kWidth * 4), aligned(4), may_alias));
typedef int32_t IntVec __attribute__((vector_size(kWidth * 4)));
typedef uint32_t UintVec __attribute__((vector_size(kWidth * 4)));
typedef uint32_t UnalignedUintVec __attribute__((vector_size(kWidth * 4), aligned(1), may_alias));
typedef uint16_t HalfVec __attribute__((vector_size(kWidth * 2)));
typedef uint16_t UnalignedHalfVec __attribute__((vector_size(kWidth * 2), aligned(2), may_alias));

inline Vec Load(const float* p) { return *reinterpret_cast<const UnalignedVec*>(p); }
inline void Store(float* p, Vec v) { *reinterpret_cast<UnalignedVec*>(p) = v; }
inline Vec Broadcast(float x) { return x - Vec{}; }  // not +: that would make -0 a +0

#if LOCKSTEP_KERNEL_WIDTH == 16
inline Vec Fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
#define LOCKSTEP_ZIP_LOW(a, b) \
  __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define LOCKSTEP_ZIP_HIGH(a, b) \
  __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
#elif LOCKSTEP_KERNEL_WIDTH == 8
inline Vec Fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
#define LOCKSTEP_ZIP_LOW(a, b) __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11)
#define LOCKSTEP_ZIP_HIGH(a, b) __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15)
#else
inline Vec Fma(Vec a, Vec b, Vec c) { return a * b + c; }
#define LOCKSTEP_ZIP_LOW(a, b) __builtin_shufflevector(a, b, 0, 4, 1, 5)
#define LOCKSTEP_ZIP_HIGH(a, b) __builtin_shufflevector(a, b, 2, 6, 3, 7)
#endif

// ---- Element types of the cache -------------------------------------------------------------

inline Vec LoadAsFloat(const float* p) { return Load(p); }

// Intrinsics, since gcc 12 splits a __builtin_convertvector in two halves; masked ones, since it
// warns about the undefined operand inside the plain ones.
inline Vec LoadAsFloat(const BF16* p) {
#if LOCKSTEP_KERNEL_WIDTH == 16
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return reinterpret_cast<Vec>(reinterpret_cast<UintVec>(_mm512_maskz_cvtepu16_epi32(0xffff, bits))
                               << 16);
#elif LOCKSTEP_KERNEL_WIDTH == 8
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return reinterpret_cast<Vec>(reinterpret_cast<UintVec>(_mm256_cvtepu16_epi32(bits)) << 16);
#else
  const HalfVec bits = *reinterpret_cast<const UnalignedHalfVec*>(p);
  return reinterpret_cast<Vec>(__builtin_convertvector(bits, UintVec) << 16);
#endif
}

inline Vec LoadAsFloat(const F16* p) {
#if LOCKSTEP_KERNEL_WIDTH == 16
  return _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif LOCKSTEP_KERNEL_WIDTH == 8
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  Vec v;
  for (int i = 0; i < kWidth; ++i) v[i] = ToFloat(p[i]);
  return v;
#endif
}

// dtype.h's conversion of a bfloat16 is inline, hence written again.
inline float ScalarToFloat(float x) { return x; }
inline float ScalarToFloat(F16 x) { return ToFloat(x); }
inline float ScalarToFloat(BF16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}

// ---- Transposition --------------------------------------------------------------------------

// rows[i][j] becomes rows[j][i]: log2(kWidth) perfect shuffles of the rows.
template <typename V>
inline void Transpose(V (&rows)[kWidth]) {
#pragma GCC unroll 4
  for (int stage = 1; stage < kWidth; stage *= 2) {
    V mixed[kWidth];
#pragma GCC unroll 8
    for (int i = 0; i < kWidth / 2; ++i) {
      mixed[2 * i] = LOCKSTEP_ZIP_LOW(rows[i], rows[i + kWidth / 2]);
      mixed[2 * i + 1] = LOCKSTEP_ZIP_HIGH(rows[i], rows[i + kWidth / 2]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kWidth; ++i) rows[i] = mixed[i];
  }
}

}  // namespace
}  // namespace lockstep
