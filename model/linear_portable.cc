#include "model/linear_kernels.h"

namespace lockstep {

namespace {

#include "model/linear_tile.h"
#include "model/silu_tile.h"

// 4 lanes: one register of every common 64-bit CPU, by the compiler's own vector type.
using Float4 = float __attribute__((vector_size(16)));

using Word4 = uint32_t __attribute__((vector_size(16)));

struct PortableBase {
  using X = float;
  using Acc = Float4;
  static constexpr int kLanes = 4;

  static Acc Zero() { return Acc{}; }
  static Acc Load(const float* p) {
    Acc a;
    __builtin_memcpy(&a, p, sizeof(a));
    return a;
  }
  static void Store(float* p, const Acc& a) { __builtin_memcpy(p, &a, sizeof(a)); }
  static Acc Add(const Acc& a, const Acc& b) { return a + b; }
  using Int = int32_t __attribute__((vector_size(16)));
  static Acc MulAdd(const Acc& a, const Acc& b, const Acc& c) { return a * b + c; }
  static Float4 Broadcast(float x) { return Float4{x, x, x, x}; }
};

struct PortableF32 : PortableBase {
  using XStep = Float4;
  using WStep = Float4;
  static constexpr int kStep = 1;
  static constexpr int kRows = 4;
  static constexpr int Vectors(int64_t) { return 2; }

  static XStep LoadX(const X* p) { return Broadcast(*p); }
  static WStep LoadW(const uint32_t* p) {
    WStep w;
    __builtin_memcpy(&w, p, sizeof(w));
    return w;
  }
  static Acc Fma(const Acc& acc, const XStep& x, const WStep& w) { return acc + x * w; }
};

// A float32 is a bfloat16 with 16 zero bits below; the pair's first element is in the lower half
// of the word.
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);
struct PortableWidened : PortableBase {
  struct XStep {
    Float4 even, odd;
  };
  using WStep = XStep;
  static constexpr int kStep = 2;
  static constexpr int kRows = 4;
  static constexpr int Vectors(int64_t) { return 2; }

  static XStep LoadX(const X* p) { return {Broadcast(p[0]), Broadcast(p[1])}; }
  static WStep LoadW(const uint32_t* p) {
    Word4 pairs;
    __builtin_memcpy(&pairs, p, sizeof(pairs));
    return {reinterpret_cast<Float4>(pairs << 16), reinterpret_cast<Float4>(pairs & 0xffff0000u)};
  }
  static Acc Fma(const Acc& acc, const XStep& x, const WStep& w) {
    return acc + x.even * w.even + x.odd * w.odd;
  }
};

void Round(const float* x, int64_t count, void* out) {
  float* rounded = static_cast<float*>(out);
  for (int64_t i = 0; i < count; ++i) rounded[i] = ToFloat(ToBF16(x[i]));
}

}  // namespace

const LinearKernels kLinearPortable = {KernelOf<PortableF32>(), KernelOf<PortableWidened>(), Round,
                                       sizeof(float), SiluMulRun<PortableBase>};

}  // namespace lockstep
