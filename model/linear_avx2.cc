// Compiled for AVX2 and FMA: see linear_tile.h for what that forbids here.
#include <immintrin.h>

#include "model/linear_kernels.h"

namespace lockstep {

namespace {

#include "model/linear_tile.h"

inline __m256i Mask(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

inline __m256 WidenBF16(__m128i bits) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

inline __m256 LoadVec(const float* p) { return _mm256_loadu_ps(p); }
inline __m256 LoadVec(const float* p, int n) { return _mm256_maskload_ps(p, Mask(n)); }
inline __m256 LoadVec(const BF16* p) {
  return WidenBF16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline __m256 LoadVec(const BF16* p, int n) {
  alignas(16) uint16_t bits[8] = {};
  for (int i = 0; i < n; ++i) bits[i] = p[i].bits;
  return WidenBF16(_mm_load_si128(reinterpret_cast<const __m128i*>(bits)));
}

template <typename Weight>
struct Avx2 {
  using X = float;
  using W = Weight;
  using XVec = __m256;
  using WVec = __m256;
  using Acc = __m256;
  static constexpr int kLanes = 8;
  static constexpr int kTileRows = 2;  // 8 sums, 4 weights and an x in 16 registers

  static Acc Zero() { return _mm256_setzero_ps(); }
  static XVec LoadX(const X* p) { return LoadVec(p); }
  static XVec LoadX(const X* p, int n) { return LoadVec(p, n); }
  static WVec LoadW(const W* p) { return LoadVec(p); }
  static WVec LoadW(const W* p, int n) { return LoadVec(p, n); }
  static Acc Fma(Acc acc, XVec x, WVec w) { return _mm256_fmadd_ps(x, w, acc); }
  static __m128 Half(Acc a) {
    return _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  }
  static void Reduce4(Acc a, Acc b, Acc c, Acc d, float* out) {
    __m128 a4 = Half(a), b4 = Half(b), c4 = Half(c), d4 = Half(d);
    _MM_TRANSPOSE4_PS(a4, b4, c4, d4);
    _mm_storeu_ps(out, _mm_add_ps(_mm_add_ps(a4, b4), _mm_add_ps(c4, d4)));
  }
};

void Round(const float* x, int64_t count, void* out) {
  float* rounded = static_cast<float*>(out);
  for (int64_t i = 0; i < count; ++i) {
    uint32_t bits;
    __builtin_memcpy(&bits, x + i, 4);
    const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
    const uint32_t nearest = bits + 0x7fffu + ((bits >> 16) & 1);
    bits = (nan ? bits | 0x400000u : nearest) & 0xffff0000u;
    __builtin_memcpy(rounded + i, &bits, 4);
  }
}

}  // namespace

const LinearKernels kLinearAvx2 = {LinearColumns<Avx2<float>>, LinearColumns<Avx2<BF16>>, Round,
                                   sizeof(float)};

}  // namespace lockstep
