// Compiled for AVX-512 F, BW, VL and BF16: see linear_tile.h for what that forbids here. The
// kernels without BF16 instructions are in this file too (the functions that use them are apart,
// and the compiler makes no BF16 instruction by itself).
#include <immintrin.h>

#include "model/linear_kernels.h"

namespace lockstep {

namespace {

#include "model/linear_tile.h"
#include "model/silu_tile.h"

struct Avx512Base {
  using Acc = __m512;
  static constexpr int kLanes = 16;

  static Acc Zero() { return _mm512_setzero_ps(); }
  static Acc Load(const float* p) { return _mm512_loadu_ps(p); }
  static void Store(float* p, Acc a) { _mm512_storeu_ps(p, a); }
  static Acc Add(Acc a, Acc b) { return _mm512_add_ps(a, b); }
  using Int = int32_t __attribute__((vector_size(64)));
  static Acc MulAdd(Acc a, Acc b, Acc c) { return _mm512_fmadd_ps(a, b, c); }
};

struct Avx512F32 : Avx512Base {
  using X = float;
  using XStep = __m512;
  using WStep = __m512;
  static constexpr int kStep = 1;
  // Of 32 registers 24 sums, 3 or 4 weights and an x.
  static constexpr int kRows = 8;
  static constexpr int Vectors(int64_t rows) { return rows <= 6 ? 4 : 3; }

  static XStep LoadX(const X* p) { return _mm512_set1_ps(*p); }
  static WStep LoadW(const uint32_t* p) { return _mm512_load_ps(p); }
  static Acc Fma(Acc acc, XStep x, WStep w) { return _mm512_fmadd_ps(x, w, acc); }
};

// bfloat16 weights without BF16 instructions: a float32 is a bfloat16 with 16 zero bits below.
struct Avx512Widened : Avx512Base {
  using X = float;
  struct XStep {
    __m512 even, odd;
  };
  using WStep = XStep;
  static constexpr int kStep = 2;
  // 18 sums, 6 weights and two x.
  static constexpr int kRows = 6;
  static constexpr int Vectors(int64_t rows) { return rows <= 4 ? 4 : 3; }

  static XStep LoadX(const X* p) { return {_mm512_set1_ps(p[0]), _mm512_set1_ps(p[1])}; }
  static WStep LoadW(const uint32_t* p) {
    const __m512i pairs = _mm512_load_si512(p);
    return {_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)),
            _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(~0xffff)))};
  }
  static Acc Fma(Acc acc, const XStep& x, const WStep& w) {
    return _mm512_fmadd_ps(x.odd, w.odd, _mm512_fmadd_ps(x.even, w.even, acc));
  }
};

struct Avx512Bf16 : Avx512Base {
  using X = BF16;
  using XStep = __m512i;
  using WStep = __m512i;
  static constexpr int kStep = 2;
  static constexpr int kRows = 8;
  static constexpr int Vectors(int64_t rows) { return rows <= 6 ? 4 : 3; }

  static XStep LoadX(const X* p) {
    int32_t pair;
    __builtin_memcpy(&pair, p, sizeof(pair));
    return _mm512_set1_epi32(pair);
  }
  static WStep LoadW(const uint32_t* p) { return _mm512_load_si512(p); }
  static Acc Fma(Acc acc, XStep x, WStep w) {
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

const LinearKernels kLinearAvx512 = {KernelOf<Avx512F32>(), KernelOf<Avx512Widened>(), RoundToFloat,
                                     sizeof(float), SiluMulRun<Avx512Base>};
const LinearKernels kLinearAvx512Bf16 = {KernelOf<Avx512F32>(), KernelOf<Avx512Bf16>(), RoundToBF16,
                                         sizeof(BF16), SiluMulRun<Avx512Base>};

}  // namespace lockstep
