#include "runtime/core/dtype.h"

#include <cmath>
#include <limits>

#include "gtest/gtest.h"

namespace lockstep {
namespace {

TEST(DTypeTest, EveryHalfSurvivesTheRoundTrip) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const F16 half{static_cast<uint16_t>(bits)};
    const float value = ToFloat(half);
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(ToFloat(ToF16(value))));
    } else {
      EXPECT_EQ(ToF16(value).bits, half.bits) << bits;
    }
  }
}

TEST(DTypeTest, HalfRoundsToNearestEven) {
  EXPECT_EQ(ToF16(1.0f + 0x1p-11f).bits, 0x3c00);      // tie: even neighbour below
  EXPECT_EQ(ToF16(1.0f + 3 * 0x1p-11f).bits, 0x3c02);  // tie: even neighbour above
  EXPECT_EQ(ToF16(1.0f + 0x1p-11f + 0x1p-20f).bits, 0x3c01);
  EXPECT_EQ(ToF16(65519.0f).bits, 0x7bff);
  EXPECT_TRUE(std::isinf(ToFloat(ToF16(65520.0f))));
  EXPECT_EQ(ToFloat(ToF16(0x1p-24f)), 0x1p-24f);
  EXPECT_EQ(ToF16(0x1p-25f).bits, 0);  // tie to zero
}

TEST(DTypeTest, EveryE4M3SurvivesTheRoundTrip) {
  for (int bits = 0; bits < 256; ++bits) {
    const F8E4M3 stored{static_cast<uint8_t>(bits)};
    const float value = ToFloat(stored);
    if ((bits & 0x7f) == 0x7f) {
      EXPECT_TRUE(std::isnan(value));
      EXPECT_EQ(ToF8E4M3(value).bits, 0x7f);
    } else {
      EXPECT_EQ(ToF8E4M3(value).bits, bits);
    }
  }
  EXPECT_EQ(ToFloat(F8E4M3{0x01}), 0x1p-9f);
  EXPECT_EQ(ToFloat(F8E4M3{0x08}), 0x1p-6f);
  EXPECT_EQ(ToFloat(F8E4M3{0x38}), 1.0f);
  EXPECT_EQ(ToFloat(F8E4M3{0xfe}), -448.0f);
}

// Between two neighbours, the nearer one; halfway, the even one. Beyond the last, the last.
TEST(DTypeTest, E4M3RoundsToNearestEvenAndSaturates) {
  for (int bits = 0; bits < 0x7e; ++bits) {
    const float low = ToFloat(F8E4M3{static_cast<uint8_t>(bits)});
    const float high = ToFloat(F8E4M3{static_cast<uint8_t>(bits + 1)});
    const float middle = (low + high) / 2;  // exact
    EXPECT_EQ(ToF8E4M3(middle).bits, bits % 2 == 0 ? bits : bits + 1) << bits;
    EXPECT_EQ(ToF8E4M3(std::nextafter(middle, 0.0f)).bits, bits) << bits;
    EXPECT_EQ(ToF8E4M3(std::nextafter(middle, 500.0f)).bits, bits + 1) << bits;
    EXPECT_EQ(ToF8E4M3(-middle).bits, ToF8E4M3(middle).bits | 0x80) << bits;
  }
  for (const float x : {448.1f, 464.0f, 480.0f, 1e30f, std::numeric_limits<float>::infinity()}) {
    EXPECT_EQ(ToF8E4M3(x).bits, 0x7e) << x;
    EXPECT_EQ(ToF8E4M3(-x).bits, 0xfe) << x;
  }
}

TEST(DTypeTest, BF16RoundsToNearestEvenAndKeepsNan) {
  EXPECT_EQ(ToBF16(1.0f + 0x1p-8f).bits, 0x3f80);
  EXPECT_EQ(ToBF16(1.0f + 3 * 0x1p-8f).bits, 0x3f82);
  EXPECT_TRUE(std::isnan(ToFloat(ToBF16(std::numeric_limits<float>::quiet_NaN()))));
  EXPECT_TRUE(std::isinf(ToFloat(ToBF16(std::numeric_limits<float>::infinity()))));
}

}  // namespace
}  // namespace lockstep
