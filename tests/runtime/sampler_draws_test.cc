// That draws follow the distribution.
#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "tests/runtime/sampler_test_util.h"

namespace lockstep {
namespace {

// Pearson's statistic against the exact distribution; ids expected fewer than 5 times are pooled.
// The draws are fixed by their seeds, so the test cannot flake.
struct ChiSquare {
  double statistic = 0;
  int degrees = -1;
};
ChiSquare Compare(const std::map<int32_t, int64_t>& counts, const std::vector<double>& p,
                  int64_t draws) {
  ChiSquare result;
  double pooled_expected = 0, pooled_count = 0;
  const auto add = [&](double expected, double count) {
    result.statistic += (count - expected) * (count - expected) / expected;
    ++result.degrees;
  };
  for (size_t id = 0; id < p.size(); ++id) {
    const auto it = counts.find(static_cast<int32_t>(id));
    const double count = it == counts.end() ? 0 : static_cast<double>(it->second);
    if (p[id] == 0) {
      EXPECT_EQ(count, 0) << "id " << id << " is outside the support";
    } else if (p[id] * static_cast<double>(draws) < 5) {
      pooled_expected += p[id] * static_cast<double>(draws);
      pooled_count += count;
    } else {
      add(p[id] * static_cast<double>(draws), count);
    }
  }
  if (pooled_expected >= 5) add(pooled_expected, pooled_count);
  return result;
}

TEST(SamplerDrawsTest, FollowsTheDistribution) {
  const std::vector<float> logits = RandomLogits(40, 11, 1.5);
  constexpr int64_t kDraws = 8000;
  const SampleRow settings[] = {{.temperature = 1},
                                {.temperature = 0.5},
                                {.temperature = 2, .top_k = 7},
                                {.temperature = 1, .top_p = 0.8},
                                {.temperature = 1, .min_p = 0.1},
                                {.temperature = 1.3, .top_p = 0.7, .top_k = 12},
                                {.temperature = 1.3, .top_p = 0.9, .min_p = 0.02}};
  for (const SampleRow& setting : settings) {
    std::vector<SampleRow> rows;
    for (int32_t i = 0; i < kDraws; ++i) {
      rows.push_back(setting);
      rows.back().seed = i % 2 == 0 ? static_cast<uint64_t>(i) : 42;
      rows.back().position = i % 2 == 0 ? 3 : i;
    }
    std::map<int32_t, int64_t> counts;
    for (const int32_t token : Tokens({logits}, rows, 2)) ++counts[token];
    const std::vector<double> p = Distribution(logits, setting).value();
    const ChiSquare chi = Compare(counts, p, kDraws);
    // Mean k, variance 2k: 5 standard deviations, as the right tail is long.
    EXPECT_LT(chi.statistic, chi.degrees + 5 * std::sqrt(2.0 * chi.degrees));
    EXPECT_GT(chi.degrees, 2);
    // Every id of a filtered support that is likely enough was drawn.
    for (size_t id = 0; id < p.size(); ++id) {
      EXPECT_TRUE(p[id] < 0.002 || counts[static_cast<int32_t>(id)] > 0) << id;
    }
  }
}

TEST(SamplerDrawsTest, NoiseIsIndependentOfNeighbouringPositionsSeedsAndIds) {
  constexpr int kCount = 100000;
  double mean = 0, by_position = 0, by_seed = 0, by_id = 0;
  constexpr double kEuler = 0.5772156649;
  for (int i = 0; i < kCount; ++i) {
    const double g = GumbelNoise(7, i, 3) - kEuler;
    mean += g / kCount;
    by_position += g * (GumbelNoise(7, i + 1, 3) - kEuler) / kCount;
    by_seed += g * (GumbelNoise(8, i, 3) - kEuler) / kCount;
    by_id += g * (GumbelNoise(7, i, 4) - kEuler) / kCount;
  }
  // Standard deviations of these: 1.28 / sqrt(n) = 0.004 and 1.64 / sqrt(n) = 0.005.
  EXPECT_NEAR(mean, 0, 0.016);
  EXPECT_NEAR(by_position, 0, 0.02);
  EXPECT_NEAR(by_seed, 0, 0.02);
  EXPECT_NEAR(by_id, 0, 0.02);
}

}  // namespace
}  // namespace lockstep
