#include "model/checkpoint/gguf_types.h"

#include <array>
#include <cstring>
#include <map>

#include "runtime/core/dtype.h"

namespace lockstep {

namespace {

// Block layouts, all numbers little-endian (ggml's ggml-common.h). In the small formats 32 values
// share a scale d, and in the _1 kinds an offset m; value = d * q + m, or d * (q - middle). In the
// K formats a super-block of 256 values holds 6-bit (Q6_K: 8-bit) scales of its sub-blocks, which
// float16 factors scale once more.
constexpr int64_t kSmall = 32;
constexpr int64_t kSuper = 256;

float LoadF16(const uint8_t* src) {
  F16 value;
  std::memcpy(&value, src, sizeof value);
  return ToFloat(value);
}

uint32_t LoadU32(const uint8_t* src) {
  uint32_t value;
  std::memcpy(&value, src, sizeof value);
  return value;
}

void DequantizeF32(const uint8_t* src, int64_t count, float* dst) {
  std::memcpy(dst, src, count * sizeof(float));
}
void DequantizeF16(const uint8_t* src, int64_t count, float* dst) {
  Convert(DType::kF16, src, DType::kF32, dst, count);
}
void DequantizeBF16(const uint8_t* src, int64_t count, float* dst) {
  Convert(DType::kBF16, src, DType::kF32, dst, count);
}

// f16 d; int8 q[32].
void DequantizeQ8_0(const uint8_t* src, int64_t count, float* dst) {
  for (; count > 0; --count, src += 34, dst += kSmall) {
    const float d = LoadF16(src);
    for (int i = 0; i < kSmall; ++i) dst[i] = d * static_cast<int8_t>(src[2 + i]);
  }
}

// f16 d; [f16 m;] 16 bytes: low halves are values 0-15, high halves 16-31.
template <bool kHasOffset>
void DequantizeQ4(const uint8_t* src, int64_t count, float* dst) {
  constexpr int kHeader = kHasOffset ? 4 : 2;
  for (; count > 0; --count, src += kHeader + 16, dst += kSmall) {
    const float d = LoadF16(src);
    const float m = kHasOffset ? LoadF16(src + 2) : 0.0f;
    constexpr int kMiddle = kHasOffset ? 0 : 8;
    for (int i = 0; i < 16; ++i) {
      const int byte = src[kHeader + i];
      dst[i] = d * static_cast<float>((byte & 15) - kMiddle) + m;
      dst[i + 16] = d * static_cast<float>((byte >> 4) - kMiddle) + m;
    }
  }
}

// As Q4, with 4 bytes between header and halves: bit i is the fifth bit of value i.
template <bool kHasOffset>
void DequantizeQ5(const uint8_t* src, int64_t count, float* dst) {
  constexpr int kHeader = kHasOffset ? 4 : 2;
  for (; count > 0; --count, src += kHeader + 20, dst += kSmall) {
    const float d = LoadF16(src);
    const float m = kHasOffset ? LoadF16(src + 2) : 0.0f;
    const uint32_t high = LoadU32(src + kHeader);
    constexpr int kMiddle = kHasOffset ? 0 : 16;
    for (int i = 0; i < 16; ++i) {
      const int byte = src[kHeader + 4 + i];
      const int low_value = (byte & 15) | static_cast<int>(high >> i & 1) << 4;
      const int high_value = (byte >> 4) | static_cast<int>(high >> (i + 16) & 1) << 4;
      dst[i] = d * static_cast<float>(low_value - kMiddle) + m;
      dst[i + 16] = d * static_cast<float>(high_value - kMiddle) + m;
    }
  }
}

// 6-bit scale and minimum of sub-block j of 8, packed in 12 bytes: the first four have a byte each
// for their six bits; the last four have their low four bits in bytes 8-11 and their high two bits
// above the first ones'.
struct ScaleAndMin {
  int scale;
  int min;
};
ScaleAndMin UnpackScale(const uint8_t* packed, int j) {
  if (j < 4) return {packed[j] & 63, packed[j + 4] & 63};
  return {(packed[j + 4] & 15) | (packed[j - 4] >> 6) << 4, (packed[j + 4] >> 4) | (packed[j] >> 6)
                                                                                       << 4};
}

// f16 d; f16 dmin; 12 bytes of scales; [32 bytes of fifth bits;] 128 bytes of halves. A run of 32
// bytes holds two sub-blocks of 32 values: one in the low halves, the next in the high ones. Bit j
// of fifth-bit byte i belongs to value i of sub-block j. value = d * scale * q - dmin * min.
template <bool kHasFifthBit>
void DequantizeQ45K(const uint8_t* src, int64_t count, float* dst) {
  constexpr int kHalves = kHasFifthBit ? 48 : 16;
  for (; count > 0; --count, src += kHalves + 128, dst += kSuper) {
    const float d = LoadF16(src);
    const float dmin = LoadF16(src + 2);
    for (int j = 0; j < 8; ++j) {
      const auto [scale, min] = UnpackScale(src + 4, j);
      const float factor = d * static_cast<float>(scale);
      const float offset = dmin * static_cast<float>(min);
      const uint8_t* halves = src + kHalves + j / 2 * 32;
      for (int i = 0; i < 32; ++i) {
        int q = halves[i] >> (j % 2 * 4) & 15;
        if (kHasFifthBit) q |= (src[16 + i] >> j & 1) << 4;
        dst[j * 32 + i] = factor * static_cast<float>(q) - offset;
      }
    }
  }
}

// 128 bytes of low halves; 64 bytes of high bit pairs; int8 scales[16]; f16 d. Each half of the
// super-block has 64 bytes of halves and 32 of pairs for four runs of 32 values: run r has its low
// bits in bytes r % 2 * 32 .. of the halves (high half of a byte from r = 2 on) and bit pair r of
// the pairs. 16 values share a scale. value = d * scale * (q - 32).
void DequantizeQ6K(const uint8_t* src, int64_t count, float* dst) {
  for (; count > 0; --count, src += 210, dst += kSuper) {
    const float d = LoadF16(src + 208);
    for (int run = 0; run < 8; ++run) {
      const int half = run / 4, r = run % 4;
      const uint8_t* low = src + half * 64 + r % 2 * 32;
      const uint8_t* pairs = src + 128 + half * 32;
      const uint8_t* scales = src + 192 + run * 2;
      for (int i = 0; i < 32; ++i) {
        const int q = (low[i] >> (r / 2 * 4) & 15) | (pairs[i] >> (2 * r) & 3) << 4;
        dst[run * 32 + i] = d * static_cast<float>(static_cast<int8_t>(scales[i / 16]) * (q - 32));
      }
    }
  }
}

struct NumberedType {
  uint32_t id;
  GgufType type;
};
constexpr std::array<NumberedType, 11> kTypes = {{
    {0, {"F32", 1, 4, DequantizeF32}},
    {1, {"F16", 1, 2, DequantizeF16}},
    {2, {"Q4_0", kSmall, 18, DequantizeQ4<false>}},
    {3, {"Q4_1", kSmall, 20, DequantizeQ4<true>}},
    {6, {"Q5_0", kSmall, 22, DequantizeQ5<false>}},
    {7, {"Q5_1", kSmall, 24, DequantizeQ5<true>}},
    {8, {"Q8_0", kSmall, 34, DequantizeQ8_0}},
    {12, {"Q4_K", kSuper, 144, DequantizeQ45K<false>}},
    {13, {"Q5_K", kSuper, 176, DequantizeQ45K<true>}},
    {14, {"Q6_K", kSuper, 210, DequantizeQ6K}},
    {30, {"BF16", 1, 2, DequantizeBF16}},
}};

}  // namespace

const GgufType* FindGgufType(uint32_t id) {
  for (const NumberedType& entry : kTypes) {
    if (entry.id == id) return &entry.type;
  }
  return nullptr;
}

std::string GgufTypeName(uint32_t id) {
  static const std::map<uint32_t, const char*> kUnreadable = {
      {9, "Q8_1"},    {10, "Q2_K"},    {11, "Q3_K"},  {15, "Q8_K"},   {16, "IQ2_XXS"},
      {17, "IQ2_XS"}, {18, "IQ3_XXS"}, {19, "IQ1_S"}, {20, "IQ4_NL"}, {21, "IQ3_S"},
      {22, "IQ2_S"},  {23, "IQ4_XS"},  {24, "I8"},    {25, "I16"},    {26, "I32"},
      {27, "I64"},    {28, "F64"},     {29, "IQ1_M"}, {34, "TQ1_0"},  {35, "TQ2_0"},
      {39, "MXFP4"}};
  if (const GgufType* type = FindGgufType(id)) return type->name;
  const auto it = kUnreadable.find(id);
  return it != kUnreadable.end() ? it->second : "type " + std::to_string(id);
}

}  // namespace lockstep
