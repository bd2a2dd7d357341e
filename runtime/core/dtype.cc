#include "runtime/core/dtype.h"

#include <cmath>
#include <cstring>
#include <limits>

#include "runtime/core/status.h"

namespace lockstep {

std::string_view Name(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return "float32";
    case DType::kF16:
      return "float16";
    case DType::kBF16:
      return "bfloat16";
    case DType::kF8E4M3:
      return "fp8_e4m3";
  }
  LOCKSTEP_CHECK(false);
}

float ToFloat(F16 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t exponent = (x.bits >> 10) & 0x1fu;
  const uint32_t mantissa = x.bits & 0x3ffu;
  if (exponent == 0x1f) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
  if (exponent == 0) {  // zero or subnormal: mantissa * 2^-24 is exact in float
    const float magnitude = std::ldexp(static_cast<float>(mantissa), -24);
    return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(magnitude));
  }
  return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

F16 ToF16(float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x);
  const uint16_t sign = static_cast<uint16_t>((u >> 16) & 0x8000u);
  const uint32_t magnitude = u & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u)};
  if (magnitude >= 0x477ff000u)
    return {static_cast<uint16_t>(sign | 0x7c00u)};  // >= 65520 rounds to infinity
  if (magnitude < 0x38800000u) {  // below 2^-14: subnormal; adding 0.5 puts the rounded mantissa in
                                  // the low bits
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return {static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3f000000u))};
  }
  const uint32_t odd = (magnitude >> 13) & 1u;
  return {static_cast<uint16_t>(sign | ((magnitude - 0x38000000u + 0xfffu + odd) >> 13))};
}

float ToFloat(F8E4M3 x) {
  const int exponent = (x.bits >> 3) & 0xf;
  const int mantissa = x.bits & 7;
  float magnitude = std::numeric_limits<float>::quiet_NaN();
  if (exponent == 0) {
    magnitude = std::ldexp(static_cast<float>(mantissa), -9);
  } else if (exponent < 0xf || mantissa < 7) {
    magnitude = std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
  }
  return (x.bits & 0x80) != 0 ? -magnitude : magnitude;
}

F8E4M3 ToF8E4M3(float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x);
  const uint8_t sign = static_cast<uint8_t>((u >> 24) & 0x80u);
  const uint32_t magnitude = u & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {0x7f};
  if (magnitude > 0x43e00000u) return {static_cast<uint8_t>(sign | 0x7eu)};  // above 448
  if (magnitude < 0x3c800000u) {  // below 2^-6: subnormal; 2^14 has steps of 2^-9
    const float shifted = std::bit_cast<float>(magnitude) + 0x1p14f;
    return {static_cast<uint8_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x46800000u))};
  }
  const uint32_t odd = (magnitude >> 20) & 1u;
  return {static_cast<uint8_t>(sign | ((magnitude - 0x3c000000u + 0x7ffffu + odd) >> 20))};
}

namespace {

template <typename From>
void ConvertFrom(const From* src, DType to, void* dst, int64_t count) {
  switch (to) {
    case DType::kF32: {
      auto* out = static_cast<float*>(dst);
      for (int64_t i = 0; i < count; ++i) out[i] = ToFloat(src[i]);
      return;
    }
    case DType::kF16: {
      auto* out = static_cast<F16*>(dst);
      for (int64_t i = 0; i < count; ++i) out[i] = ToF16(ToFloat(src[i]));
      return;
    }
    case DType::kBF16: {
      auto* out = static_cast<BF16*>(dst);
      for (int64_t i = 0; i < count; ++i) out[i] = ToBF16(ToFloat(src[i]));
      return;
    }
    case DType::kF8E4M3: {
      auto* out = static_cast<F8E4M3*>(dst);
      for (int64_t i = 0; i < count; ++i) out[i] = ToF8E4M3(ToFloat(src[i]));
      return;
    }
  }
}

}  // namespace

void Convert(DType from, const void* src, DType to, void* dst, int64_t count) {
  if (from == to) {
    std::memcpy(dst, src, static_cast<size_t>(count * SizeOf(from)));
    return;
  }
  switch (from) {
    case DType::kF32:
      return ConvertFrom(static_cast<const float*>(src), to, dst, count);
    case DType::kF16:
      return ConvertFrom(static_cast<const F16*>(src), to, dst, count);
    case DType::kBF16:
      return ConvertFrom(static_cast<const BF16*>(src), to, dst, count);
    case DType::kF8E4M3:
      return ConvertFrom(static_cast<const F8E4M3*>(src), to, dst, count);
  }
}

}  // namespace lockstep
