#include "model/checkpoint/gguf_types.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "tests/checkpoint/test_files.h"

namespace lockstep {
namespace {

double Half(const uint8_t* p) {
  const int bits = p[0] | p[1] << 8;
  const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  const double magnitude =
      exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
  return bits >> 15 ? -magnitude : magnitude;
}
int Bit(const uint8_t* bits, int i) { return bits[i / 8] >> (i % 8) & 1; }
// Four bits of a byte: the low ones for half 0.
int Nibble(uint8_t byte, int half) { return half ? byte / 16 : byte % 16; }
// The 6-bit numbers of the K formats: `which` 0 for scales, 1 for minima.
int Packed6(const uint8_t* packed, int which, int j) {
  if (j < 4) return packed[which * 4 + j] % 64;
  return Nibble(packed[8 + j - 4], which) + 16 * (packed[which * 4 + j - 4] / 64);
}

// Value i of a block, from the definition of its format, one value at a time in double precision.
double Reference(const std::string& type, const uint8_t* b, int i) {
  if (type == "Q8_0") return Half(b) * static_cast<int8_t>(b[2 + i]);
  if (type == "Q4_0") return Half(b) * (Nibble(b[2 + i % 16], i / 16) - 8);
  if (type == "Q4_1") return Half(b) * Nibble(b[4 + i % 16], i / 16) + Half(b + 2);
  if (type == "Q5_0") {
    return Half(b) * (Nibble(b[6 + i % 16], i / 16) + 16 * Bit(b + 2, i) - 16);
  }
  if (type == "Q5_1") {
    return Half(b) * (Nibble(b[8 + i % 16], i / 16) + 16 * Bit(b + 4, i)) + Half(b + 2);
  }
  const int sub = i / 32;
  if (type == "Q4_K" || type == "Q5_K") {
    const uint8_t* nibbles = b + (type == "Q4_K" ? 16 : 48);
    int q = Nibble(nibbles[sub / 2 * 32 + i % 32], sub % 2);
    if (type == "Q5_K") q += 16 * Bit(b + 16 + i % 32, sub);
    return Half(b) * Packed6(b + 4, 0, sub) * q - Half(b + 2) * Packed6(b + 4, 1, sub);
  }
  if (type == "Q6_K") {
    const int low = Nibble(b[sub / 4 * 64 + sub % 2 * 32 + i % 32], sub % 4 / 2);
    const int high = b[128 + sub / 4 * 32 + i % 32] >> (sub % 4 * 2) & 3;
    return Half(b + 208) * static_cast<int8_t>(b[192 + i / 16]) * (low + 16 * high - 32);
  }
  ADD_FAILURE() << type;
  return 0;
}

const std::map<std::string, std::pair<uint32_t, std::vector<int>>>& HalfOffsets() {
  static const std::map<std::string, std::pair<uint32_t, std::vector<int>>> kOffsets = {
      {"Q4_0", {2, {0}}}, {"Q4_1", {3, {0, 2}}},  {"Q5_0", {6, {0}}},     {"Q5_1", {7, {0, 2}}},
      {"Q8_0", {8, {0}}}, {"Q4_K", {12, {0, 2}}}, {"Q5_K", {13, {0, 2}}}, {"Q6_K", {14, {208}}}};
  return kOffsets;
}

TEST(GgufTypes, BlocksDecodeAsTheFormatDefinesThem) {
  std::mt19937 random(3);
  for (const auto& [name, entry] : HalfOffsets()) {
    const auto& [id, halves] = entry;
    const GgufType* type = FindGgufType(id);
    ASSERT_NE(type, nullptr) << name;
    EXPECT_EQ(type->name, name);
    constexpr int kBlocks = 20;
    std::vector<uint8_t> bytes(kBlocks * type->block_bytes);
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
    for (int block = 0; block < kBlocks; ++block) {
      // Finite factors: an exponent below 31.
      for (const int at : halves) bytes[block * type->block_bytes + at + 1] &= 0xbf;
    }
    std::vector<float> values(kBlocks * type->block_values);
    type->dequantize(bytes.data(), kBlocks, values.data());
    for (int64_t i = 0; i < static_cast<int64_t>(values.size()); ++i) {
      const uint8_t* block = bytes.data() + i / type->block_values * type->block_bytes;
      const double expected = Reference(name, block, static_cast<int>(i % type->block_values));
      // Both terms of a difference may be large: 63 * 31 * 2 is the largest sum of magnitudes.
      ASSERT_NEAR(values[i], expected, 1e-6 * (std::fabs(expected) + 4000)) << name << " " << i;
      if (std::fabs(expected) > 1e4) {
        ASSERT_NEAR(values[i] / expected, 1, 1e-3) << name << " " << i;
      }
    }
  }
}

TEST(GgufTypes, BlocksDecodeAsThePythonPackageDecodesThem) {
  const auto json = ParseJson(
      ReadAll(std::string(LOCKSTEP_SOURCE_DIR) + "/tests/data/checkpoint/gguf_blocks.json"),
      "json");
  ASSERT_TRUE(json.ok()) << json.status();
  int types = 0;
  for (const auto& [name, entry] : (*json)["types"].items()) {
    const GgufType* type = FindGgufType(entry["type"].get<uint32_t>());
    ASSERT_NE(type, nullptr) << name;
    EXPECT_EQ(type->name, name);
    const std::string hex = entry["bytes"].get<std::string>();
    std::vector<uint8_t> bytes;
    for (size_t i = 0; i < hex.size(); i += 2) {
      bytes.push_back(static_cast<uint8_t>(std::stoi(hex.substr(i, 2), nullptr, 16)));
    }
    const std::vector<float> expected = entry["values"].get<std::vector<float>>();
    const auto blocks = static_cast<int64_t>(bytes.size()) / type->block_bytes;
    ASSERT_EQ(blocks * type->block_values, static_cast<int64_t>(expected.size())) << name;
    std::vector<float> values(expected.size());
    type->dequantize(bytes.data(), blocks, values.data());
    for (size_t i = 0; i < values.size(); ++i) {
      ASSERT_NEAR(values[i], expected[i], 1e-6f * (1 + std::fabs(expected[i]))) << name << " " << i;
    }
    ++types;
  }
  EXPECT_EQ(types, 10);
}

TEST(GgufTypes, UnreadableTypesHaveNames) {
  EXPECT_EQ(FindGgufType(20), nullptr);
  EXPECT_EQ(GgufTypeName(20), "IQ4_NL");
  EXPECT_EQ(GgufTypeName(8), "Q8_0");
  EXPECT_EQ(GgufTypeName(999), "type 999");
}

}  // namespace
}  // namespace lockstep
