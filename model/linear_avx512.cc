// Compiled for AVX-512 F, BW, VL and BF16: see linear_tile.h for what that forbids here. The
// kernels without BF16 instructions are in this file too (the functions that use them are apart,
// and the compiler makes no BF16 instruction by itself).
#include <immintrin.h>

#include "model/linear_kernels.h"

namespace lockstep {

namespace {

#include "model/linear_tile.h"

inline __m512 WidenBF16(__m256i bits) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

inline __m512 LoadVec(const float* p) { return _mm512_loadu_ps(p); }
inline __m512 LoadVec(const float* p, int n) {
  return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << n) - 1), p);
}
inline __m512 LoadVec(const BF16* p) {
  return WidenBF16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline __m512 LoadVec(const BF16* p, int n) {
  return WidenBF16(_mm256_maskz_loadu_epi16(static_cast<__mmask16>((1u << n) - 1), p));
}

inline __m128 Quarter(__m512 a) {
  const __m256 half = _mm256_add_ps(
      _mm512_castps512_ps256(a), _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a), 1)));
  return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

struct Avx512Base {
  using Acc = __m512;
  static constexpr int kTileRows = 4;  // 16 sums, 4 weights and an x in 32 registers

  static Acc Zero() { return _mm512_setzero_ps(); }
  static void Reduce4(Acc a, Acc b, Acc c, Acc d, float* out) {
    __m128 a4 = Quarter(a), b4 = Quarter(b), c4 = Quarter(c), d4 = Quarter(d);
    _MM_TRANSPOSE4_PS(a4, b4, c4, d4);
    _mm_storeu_ps(out, _mm_add_ps(_mm_add_ps(a4, b4), _mm_add_ps(c4, d4)));
  }
};

template <typename Weight>
struct Avx512 : Avx512Base {
  using X = float;
  using W = Weight;
  using XVec = __m512;
  using WVec = __m512;
  static constexpr int kLanes = 16;

  static XVec LoadX(const X* p) { return LoadVec(p); }
  static XVec LoadX(const X* p, int n) { return LoadVec(p, n); }
  static WVec LoadW(const W* p) { return LoadVec(p); }
  static WVec LoadW(const W* p, int n) { return LoadVec(p, n); }
  static Acc Fma(Acc acc, XVec x, WVec w) { return _mm512_fmadd_ps(x, w, acc); }
};

// Pairs of bfloat16 products go to one float32 lane.
struct Avx512Bf16 : Avx512Base {
  using X = BF16;
  using W = BF16;
  using XVec = __m512i;
  using WVec = __m512i;
  static constexpr int kLanes = 32;  // elements of K a vector

  static __m512i Load(const BF16* p) { return _mm512_loadu_si512(p); }
  static __m512i Load(const BF16* p, int n) {
    return _mm512_maskz_loadu_epi16(static_cast<__mmask32>((uint64_t{1} << n) - 1), p);
  }
  static XVec LoadX(const X* p) { return Load(p); }
  static XVec LoadX(const X* p, int n) { return Load(p, n); }
  static WVec LoadW(const W* p) { return Load(p); }
  static WVec LoadW(const W* p, int n) { return Load(p, n); }
  static Acc Fma(Acc acc, XVec x, WVec w) {
    return _mm512_dpbf16_ps(acc, reinterpret_cast<__m512bh>(x), reinterpret_cast<__m512bh>(w));
  }
};

// The bits of x rounded to bfloat16, in the upper half of each lane.
inline __m512i RoundedBits(__m512 x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i nearest = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
  return _mm512_mask_mov_epi32(nearest, nan, quiet);
}

inline __mmask16 MaskOfRest(int64_t rest) {
  return rest >= 16 ? 0xffff : static_cast<__mmask16>((1u << rest) - 1);
}

void RoundToFloat(const float* x, int64_t count, void* out) {
  float* rounded = static_cast<float*>(out);
  for (int64_t i = 0; i < count; i += 16) {
    const __mmask16 mask = MaskOfRest(count - i);
    const __m512i bits = RoundedBits(_mm512_maskz_loadu_ps(mask, x + i));
    _mm512_mask_storeu_epi32(rounded + i, mask, _mm512_and_si512(bits, _mm512_set1_epi32(~0xffff)));
  }
}

// Not the conversion instruction: that one flushes denormals.
void RoundToBF16(const float* x, int64_t count, void* out) {
  uint16_t* rounded = static_cast<uint16_t*>(out);
  for (int64_t i = 0; i < count; i += 16) {
    const __mmask16 mask = MaskOfRest(count - i);
    const __m512i bits = RoundedBits(_mm512_maskz_loadu_ps(mask, x + i));
    _mm256_mask_storeu_epi16(rounded + i, mask, _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16)));
  }
}

}  // namespace

const LinearKernels kLinearAvx512 = {LinearColumns<Avx512<float>>, LinearColumns<Avx512<BF16>>,
                                     RoundToFloat, sizeof(float)};
const LinearKernels kLinearAvx512Bf16 = {LinearColumns<Avx512<float>>, LinearColumns<Avx512Bf16>,
                                         RoundToBF16, sizeof(BF16)};

}  // namespace lockstep
