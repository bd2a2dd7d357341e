#include "attention/cpu_kernels.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"

namespace lockstep {
namespace {

class CpuKernelsTest : public testing::TestWithParam<int64_t> {
 protected:
  const CpuKernels& kernels_ = *UsableCpuKernels().begin[GetParam()];

  float Exp(float x) const {
    float y = -1;
    kernels_.exp_nonpositive(&x, 1, &y);
    return y;
  }
};

TEST_P(CpuKernelsTest, ExpKeepsItsErrorBound) {
  std::vector<float> x;
  for (int i = 0; i < 2'000'000; ++i) x.push_back(-87.33f * static_cast<float>(i) / 2'000'000);
  for (float tiny = 1e-30f; tiny < 1; tiny *= 1.5f) x.push_back(-tiny);
  std::vector<float> y(x.size());
  kernels_.exp_nonpositive(x.data(), static_cast<int64_t>(x.size()), y.data());
  double worst = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    const double exact = std::exp(double{x[i]});
    worst = std::max(worst, std::abs(y[i] - exact) / exact);
    ASSERT_LE(y[i], 1.0f);
  }
  RecordProperty("worst_relative_error", absl::StrFormat("%.2e", worst));
  EXPECT_LT(worst, kExpRelativeError);
}

TEST_P(CpuKernelsTest, ExpAtTheEnds) {
  EXPECT_EQ(Exp(0.0f), 1.0f);
  EXPECT_EQ(Exp(-0.0f), 1.0f);
  EXPECT_EQ(Exp(-87.5f), 0.0f);
  EXPECT_EQ(Exp(-1e30f), 0.0f);
  EXPECT_EQ(Exp(-std::numeric_limits<float>::infinity()), 0.0f);
  EXPECT_TRUE(std::isnan(Exp(std::numeric_limits<float>::quiet_NaN())));
}

// A row that saw no key in a tile keeps the bits it has, negative zeros included.
TEST_P(CpuKernelsTest, FoldLeavesRowsAloneThatSawNothing) {
  std::vector<float> max = {2, -std::numeric_limits<float>::infinity()};
  std::vector<float> sum = {3, 0};
  std::vector<float> acc(32, -0.0f);
  std::vector<float> partial_max = {-std::numeric_limits<float>::infinity(), 5};
  std::vector<float> partial_sum = {0, 4};
  std::vector<float> partial_acc(32, 7.0f);
  kernels_.fold(2, 16, {partial_max.data(), partial_sum.data(), partial_acc.data()},
                {max.data(), sum.data(), acc.data()});
  EXPECT_EQ(max, (std::vector<float>{2, 5}));
  EXPECT_EQ(sum, (std::vector<float>{3, 4}));
  for (int i = 0; i < 16; ++i) {
    EXPECT_EQ(acc[i], 0.0f);
    EXPECT_TRUE(std::signbit(acc[i]));
    EXPECT_EQ(acc[16 + i], 7.0f);
  }
}

INSTANTIATE_TEST_SUITE_P(Sets, CpuKernelsTest, testing::Range(int64_t{0}, UsableCpuKernels().size),
                         [](const auto& info) {
                           return std::string(UsableCpuKernels().begin[info.param]->name);
                         });

TEST(CpuKernelListTest, ThePortableSetIsLast) {
  const CpuKernelList usable = UsableCpuKernels();
  ASSERT_GE(usable.size, 1);
  EXPECT_STREQ(usable.begin[usable.size - 1]->name, "portable");
}

}  // namespace
}  // namespace lockstep
