// Compiled for AVX2 and FMA: see linear_tile.h for what that forbids here.
#include <immintrin.h>

#include "model/linear_kernels.h"

namespace lockstep {

namespace {

#include "model/linear_tile.h"
#include "model/silu_tile.h"

struct Avx2Base {
  using X = float;
  using Acc = __m256;
  static constexpr int kLanes = 8;

  static Acc Zero() { return _mm256_setzero_ps(); }
  static Acc Load(const float* p) { return _mm256_loadu_ps(p); }
  static void Store(float* p, Acc a) { _mm256_storeu_ps(p, a); }
  static Acc Add(Acc a, Acc b) { return _mm256_add_ps(a, b); }
  using Int = int32_t __attribute__((vector_size(32)));
  static Acc MulAdd(Acc a, Acc b, Acc c) { return _mm256_fmadd_ps(a, b, c); }
};

struct Avx2F32 : Avx2Base {
  using XStep = __m256;
  using WStep = __m256;
  static constexpr int kStep = 1;
  // Of 16 registers 12 sums, 2 weights and an x.
  static constexpr int kRows = 6;
  static constexpr int Vectors(int64_t rows) { return rows <= 2 ? 4 : 2; }

  static XStep LoadX(const X* p) { return _mm256_set1_ps(*p); }
  static WStep LoadW(const uint32_t* p) {
    return _mm256_load_ps(reinterpret_cast<const float*>(p));
  }
  static Acc Fma(Acc acc, XStep x, WStep w) { return _mm256_fmadd_ps(x, w, acc); }
};

// A float32 is a bfloat16 with 16 zero bits below.
struct Avx2Widened : Avx2Base {
  struct XStep {
    __m256 even, odd;
  };
  using WStep = XStep;
  static constexpr int kStep = 2;
  // 8 sums, 4 weights and two x.
  static constexpr int kRows = 4;
  static constexpr int Vectors(int64_t) { return 2; }

  static XStep LoadX(const X* p) { return {_mm256_set1_ps(p[0]), _mm256_set1_ps(p[1])}; }
  static WStep LoadW(const uint32_t* p) {
    const __m256i pairs = _mm256_load_si256(reinterpret_cast<const __m256i*>(p));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)),
            _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(~0xffff)))};
  }
  static Acc Fma(Acc acc, const XStep& x, const WStep& w) {
    return _mm256_fmadd_ps(x.odd, w.odd, _mm256_fmadd_ps(x.even, w.even, acc));
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

const LinearKernels kLinearAvx2 = {KernelOf<Avx2F32>(), KernelOf<Avx2Widened>(), Round,
                                   sizeof(float), SiluMulRun<Avx2Base>};

}  // namespace lockstep
