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

TEST(DTypeTest, BF16RoundsToNearestEvenAndKeepsNan) {
  EXPECT_EQ(ToBF16(1.0f + 0x1p-8f).bits, 0x3f80);
  EXPECT_EQ(ToBF16(1.0f + 3 * 0x1p-8f).bits, 0x3f82);
  EXPECT_TRUE(std::isnan(ToFloat(ToBF16(std::numeric_limits<float>::quiet_NaN()))));
  EXPECT_TRUE(std::isinf(ToFloat(ToBF16(std::numeric_limits<float>::infinity()))));
}

}  // namespace
}  // namespace lockstep
