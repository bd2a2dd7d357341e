// silu(gate) * up in vectors, for all instruction sets: instantiated by linear_*.cc like
// linear_tile.h, whose rules hold here. V has besides: Int, a vector of int32_t as wide as Acc, and
// MulAdd(a, b, c) = a * b + c.
//
// silu(x) = x / (1 + exp(-x)), by e = exp(-|x|), which never overflows: x / (1 + e) where x is
// positive, x * e / (1 + e) where it is not. exp(y) = 2^n * exp(r), n = round(y / ln 2), and a
// polynomial for exp(r), |r| <= ln(2) / 2 (Taylor's of degree 7: the term left out is below 6e-9);
// ln 2 in two parts (Cody and Waite), so that n * kLn2High is exact. Below -87.33 e is taken as 0:
// the result is then off by less than 2e-36.

template <class V>
inline typename V::Acc Splat(float x) {
  return x - typename V::Acc{};  // not +: that would make -0 a +0
}

template <class V>
inline typename V::Acc SiluMulVector(typename V::Acc gate, typename V::Acc up) {
  using F = typename V::Acc;
  using I = typename V::Int;
  constexpr float kLowest = -87.33f;
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves round(x) in the low bits
  constexpr int32_t kRoundBits = 0x4b400000;
  const F magnitude = gate < 0.0f ? gate : -gate;
  const F y = magnitude < kLowest ? Splat<V>(kLowest) : magnitude;
  const F shifted = V::MulAdd(y, Splat<V>(1.44269504f), Splat<V>(kRound));
  const F n = shifted - kRound;
  F r = V::MulAdd(n, Splat<V>(-0.693359375f), y);
  r = V::MulAdd(n, Splat<V>(2.12194440e-4f), r);
  F p = Splat<V>(1.0f / 5040);
  p = V::MulAdd(p, r, Splat<V>(1.0f / 720));
  p = V::MulAdd(p, r, Splat<V>(1.0f / 120));
  p = V::MulAdd(p, r, Splat<V>(1.0f / 24));
  p = V::MulAdd(p, r, Splat<V>(1.0f / 6));
  p = V::MulAdd(p, r, Splat<V>(0.5f));
  p = V::MulAdd(p, r, Splat<V>(1.0f));
  p = V::MulAdd(p, r, Splat<V>(1.0f));
  const I exponent = (reinterpret_cast<I>(shifted) - kRoundBits + 127) << 23;
  const F e = magnitude < kLowest ? Splat<V>(0.0f) : p * reinterpret_cast<F>(exponent);
  const F numerator = gate < 0.0f ? gate * e : gate;
  return numerator / (1.0f + e) * up;
}

// Whole vectors only, the last one filled up: an element's bits do not depend on its place.
template <class V>
void SiluMulRun(const float* gate, const float* up, int64_t count, float* out) {
  int64_t i = 0;
  for (; i + V::kLanes <= count; i += V::kLanes) {
    V::Store(out + i, SiluMulVector<V>(V::Load(gate + i), V::Load(up + i)));
  }
  if (i == count) return;
  float rest[3][V::kLanes] = {};
  for (int64_t j = 0; j < count - i; ++j) {
    rest[0][j] = gate[i + j];
    rest[1][j] = up[i + j];
  }
  V::Store(rest[2], SiluMulVector<V>(V::Load(rest[0]), V::Load(rest[1])));
  for (int64_t j = 0; j < count - i; ++j) out[i + j] = rest[2][j];
}
