#include "runtime/core/dtype.h"

#include <cmath>
#include <cstring>

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
  }
}

}  // namespace lockstep
