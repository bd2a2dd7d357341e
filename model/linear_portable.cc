#include "model/linear_kernels.h"

namespace lockstep {

namespace {

#include "model/linear_tile.h"

// 4 lanes: one register of every common 64-bit CPU, by the compiler's own vector type.
using Float4 = float __attribute__((vector_size(16)));

float Widen(float x) { return x; }
float Widen(BF16 x) { return ToFloat(x); }

template <typename Weight>
struct Portable {
  using X = float;
  using W = Weight;
  using XVec = Float4;
  using WVec = Float4;
  using Acc = Float4;
  static constexpr int kLanes = 4;
  static constexpr int kTileRows = 2;

  static Acc Zero() { return Acc{}; }
  template <typename T>
  static Float4 Load(const T* p, int n) {
    Float4 v = {};
    for (int i = 0; i < n; ++i) v[i] = Widen(p[i]);
    return v;
  }
  static XVec LoadX(const X* p) { return Load(p, kLanes); }
  static XVec LoadX(const X* p, int n) { return Load(p, n); }
  static WVec LoadW(const W* p) { return Load(p, kLanes); }
  static WVec LoadW(const W* p, int n) { return Load(p, n); }
  static Acc Fma(Acc acc, XVec x, WVec w) { return acc + x * w; }
  static float Sum(const Acc& a) { return (a[0] + a[1]) + (a[2] + a[3]); }
  static void Reduce4(const Acc& a, const Acc& b, const Acc& c, const Acc& d, float* out) {
    out[0] = Sum(a);
    out[1] = Sum(b);
    out[2] = Sum(c);
    out[3] = Sum(d);
  }
};

void Round(const float* x, int64_t count, void* out) {
  float* rounded = static_cast<float*>(out);
  for (int64_t i = 0; i < count; ++i) rounded[i] = ToFloat(ToBF16(x[i]));
}

}  // namespace

const LinearKernels kLinearPortable = {LinearColumns<Portable<float>>,
                                       LinearColumns<Portable<BF16>>, Round, sizeof(float)};

}  // namespace lockstep
