// Element types of weights, activations and the KV pool, and scalar conversions between them.
#pragma once

#include <bit>
#include <cstdint>
#include <string_view>

namespace lockstep {

// kF8E4M3 stores keys and values in the KV cache, nothing else: 4 bits of exponent and 3 of
// mantissa, no infinity (Micikevicius et al. 2022, "FP8 formats for deep learning").
enum class DType { kF32, kF16, kBF16, kF8E4M3 };

constexpr int64_t SizeOf(DType dtype) {
  return dtype == DType::kF32 ? 4 : dtype == DType::kF8E4M3 ? 1 : 2;
}

// "float32", "float16", "bfloat16", "fp8_e4m3": the names the command line and config.json use.
std::string_view Name(DType dtype);

// Storage of a bfloat16, an IEEE binary16 and an E4M3: bits only, arithmetic is done in float.
struct BF16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};
struct F8E4M3 {
  uint8_t bits;
};

inline float ToFloat(float x) { return x; }
inline float ToFloat(BF16 x) { return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }
float ToFloat(F16 x);
float ToFloat(F8E4M3 x);

// Rounds to nearest, ties to even; NaN stays NaN.
inline BF16 ToBF16(float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((u >> 16) | 0x40)};
  return {static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1)) >> 16)};
}
F16 ToF16(float x);        // values above 65504 become infinite: check before where that matters
F8E4M3 ToF8E4M3(float x);  // magnitudes above 448, infinity too, become 448

// Converts `count` elements from `from` at `src` to `to` at `dst` (nearest-even). The ranges may
// not overlap.
void Convert(DType from, const void* src, DType to, void* dst, int64_t count);

}  // namespace lockstep
