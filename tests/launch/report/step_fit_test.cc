#include "launch/report/step_fit.h"

#include <gtest/gtest.h>

#include <cmath>

#include "launch/report/nnls.h"

namespace lockstep {
namespace {

TEST(Nnls, FindsAnExactSolution) {
  const auto x = NonNegativeLeastSquares({{1, 0, 1, 2}, {0, 1, 1, -1}}, {3, 5, 8, 1});
  ASSERT_EQ(x.size(), 2u);
  EXPECT_NEAR(x[0], 3, 1e-12);
  EXPECT_NEAR(x[1], 5, 1e-12);
}

TEST(Nnls, KeepsToTheBound) {
  // Without the bound: x = (2, -1). With it the second is 0, and the first the projection of b on
  // (1, 1): (2 + 1) / 2.
  const auto x = NonNegativeLeastSquares({{1, 1}, {0, 1}}, {2, 1});
  EXPECT_NEAR(x[0], 1.5, 1e-12);
  EXPECT_EQ(x[1], 0);
  // Nothing positive is any good.
  EXPECT_EQ(NonNegativeLeastSquares({{1, 1}, {2, 1}}, {-1, -1}), (std::vector<double>{0, 0}));
  EXPECT_EQ(NonNegativeLeastSquares({{0, 0}}, {1, 1}), std::vector<double>{0});
}

// No grid point near x, none below 0, is better.
TEST(Nnls, IsTheLeast) {
  const std::vector<std::vector<double>> columns = {
      {1, 2, 3, 1, 0.5}, {2, 1, 0.1, 1, 3}, {1, 1, 1, 1, 1}};
  const std::vector<double> b = {1, 4, 2, 0.1, -1};
  const auto squares = [&](const std::vector<double>& x) {
    double sum = 0;
    for (size_t i = 0; i < b.size(); ++i) {
      double rest = b[i];
      for (size_t j = 0; j < x.size(); ++j) rest -= columns[j][i] * x[j];
      sum += rest * rest;
    }
    return sum;
  };
  const auto best = NonNegativeLeastSquares(columns, b);
  for (double a = 0; a < 2; a += 0.05) {
    for (double c = 0; c < 2; c += 0.05) {
      for (double d = 0; d < 2; d += 0.05) EXPECT_GE(squares({a, c, d}) + 1e-12, squares(best));
    }
  }
}

TEST(Nnls, UnexplainedShare) {
  EXPECT_DOUBLE_EQ(UnexplainedShare({3, 4}, {}), 1);
  EXPECT_DOUBLE_EQ(UnexplainedShare({3, 4}, {{1, 0}}), 0.8);
  EXPECT_NEAR(UnexplainedShare({3, 4, 0}, {{1, 1, 0}, {1, -1, 0}}), 0, 1e-15);
  EXPECT_EQ(UnexplainedShare({0, 0}, {{1, 0}}), 0);
}

ModelConfig Shape() {
  ModelConfig shape;
  shape.hidden_size = 2048;
  shape.intermediate_size = 8192;
  shape.num_layers = 16;
  shape.num_query_heads = 32;
  shape.num_kv_heads = 8;
  shape.head_dim = 64;
  shape.vocab_size = 128000;
  return shape;
}

constexpr FitSetting kSetting = {
    .input_len = 512, .output_len = 64, .dtype = DType::kBF16, .kv_dtype = DType::kBF16};

// 4 TB/s, 700 TFLOP/s, 200 us of host a step, 6 us a sum, 300 GB/s.
constexpr double kTruth[kNumFitTerms] = {1 / 4e12, 1 / 7e14, 2e-4, 6e-6, 1 / 3e11};

FitPoint Synthetic(const std::string& phase, int64_t batch, int ranks) {
  FitPoint point = *AmountsOf(Shape(), kSetting, phase, batch, ranks, 1);
  for (int term = 0; term < kNumFitTerms; ++term) {
    point.seconds += kTruth[term] * point.amounts[term];
  }
  return point;
}

std::vector<FitPoint> SyntheticPoints(const std::vector<int>& ranks) {
  std::vector<FitPoint> points;
  for (const char* phase : {"prefill", "decode"}) {
    for (const int64_t batch : {1, 8, 64}) {
      for (const int n : ranks) points.push_back(Synthetic(phase, batch, n));
    }
  }
  return points;
}

TEST(StepFit, FindsTheParametersThatMadeThePoints) {
  const StepFit fit = FitPoints(SyntheticPoints({1, 2, 4}));
  EXPECT_EQ(fit.not_made, "");
  EXPECT_EQ(fit.num_fitted, 5);
  for (int term = 0; term < kNumFitTerms; ++term) {
    EXPECT_EQ(fit.parameters[term].state, FitParameter::State::kFitted) << FitTermName(term);
    EXPECT_NEAR(fit.parameters[term].seconds_per_unit / kTruth[term], 1, 1e-6) << FitTermName(term);
  }
  for (const FitPoint& point : fit.points) {
    EXPECT_NEAR(FittedSeconds(fit, point) / point.seconds, 1, 1e-9);
    double sum = 0;
    for (int term = 0; term < kNumFitTerms; ++term) sum += TermSeconds(fit, point, term);
    EXPECT_DOUBLE_EQ(sum, FittedSeconds(fit, point));
  }
  // What was not measured follows from them.
  const FitPoint eight = Synthetic("decode", 8, 8);
  EXPECT_NEAR(FittedSeconds(fit, eight) / eight.seconds, 1, 1e-6);
}

TEST(StepFit, NoiseMakesErrorsThatTheStandardErrorTells) {
  std::vector<FitPoint> points = SyntheticPoints({1, 2, 4, 8});
  for (size_t i = 0; i < points.size(); ++i) points[i].seconds *= i % 3 == 0 ? 1.03 : 0.985;
  const StepFit fit = FitPoints(points);
  for (int term = 0; term < kNumFitTerms; ++term) {
    const FitParameter& p = fit.parameters[term];
    ASSERT_EQ(p.state, FitParameter::State::kFitted) << FitTermName(term);
    ASSERT_TRUE(p.standard_error.has_value());
    EXPECT_LT(std::abs(p.seconds_per_unit - kTruth[term]), 4 * *p.standard_error)
        << FitTermName(term);
  }
}

TEST(StepFit, WhatCannotBeToldApartIsNamed) {
  // Decode of one request at two N: operations follow the bytes but for what KV adds, and the two
  // amounts of sums are one point's.
  const StepFit fit = FitPoints({Synthetic("decode", 1, 1), Synthetic("decode", 1, 2)});
  EXPECT_EQ(fit.parameters[kFitBytes].state, FitParameter::State::kFitted);
  EXPECT_EQ(fit.parameters[kFitOperations].state, FitParameter::State::kNotSeparate);
  EXPECT_EQ(fit.parameters[kFitOperations].not_apart_from, std::vector<int>{kFitBytes});
  EXPECT_EQ(fit.parameters[kFitOperations].seconds_per_unit, 0);
  EXPECT_EQ(fit.parameters[kFitSumLatency].state, FitParameter::State::kNotSeparate);
  EXPECT_EQ(fit.parameters[kFitSumBytes].state, FitParameter::State::kNotSeparate);
  EXPECT_FALSE(fit.parameters[kFitBytes].standard_error.has_value());
}

TEST(StepFit, OneNumberOfRanksMakesNone) {
  EXPECT_NE(FitPoints(SyntheticPoints({2})).not_made.find("two numbers of ranks"),
            std::string::npos);
  EXPECT_NE(FitPoints({}).not_made, "");
}

TEST(StepFit, Amounts) {
  const FitPoint one = *AmountsOf(Shape(), kSetting, "decode", 4, 1, 1);
  EXPECT_EQ(one.amounts[kFitSumLatency], 0);
  EXPECT_EQ(one.amounts[kFitSumBytes], 0);
  EXPECT_EQ(one.amounts[kFitHost], 1);
  const FitPoint two = *AmountsOf(Shape(), kSetting, "decode", 4, 2, 1);
  EXPECT_EQ(two.amounts[kFitSumLatency], 33);                 // 2 L + 1
  EXPECT_EQ(two.amounts[kFitSumBytes], 33.0 * 4 * 2048 * 2);  // 2 (N - 1) / N = 1
  EXPECT_NEAR(two.amounts[kFitBytes] / one.amounts[kFitBytes], 0.5, 0.001);
  // Two cores of a rank halve what each has to do.
  EXPECT_EQ(AmountsOf(Shape(), kSetting, "decode", 4, 2, 2)->amounts[kFitBytes] * 2,
            two.amounts[kFitBytes]);
  // 8 * 512 tokens are two steps of 2048.
  EXPECT_EQ(AmountsOf(Shape(), kSetting, "prefill", 8, 2, 1)->amounts[kFitHost], 2);
  EXPECT_EQ(AmountsOf(Shape(), kSetting, "prefill", 8, 2, 1)->amounts[kFitSumLatency], 66);
  EXPECT_FALSE(AmountsOf(Shape(), kSetting, "decode", 1, 64, 1).has_value());
}

}  // namespace
}  // namespace lockstep
