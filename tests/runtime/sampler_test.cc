#include "runtime/sampler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <random>

#include "parallel/local_communicator.h"

namespace lockstep {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

std::vector<Range> SplitVocab(int64_t vocab_size, int num_ranks) {
  std::vector<Range> ranges;
  for (int64_t r = 0; r < num_ranks; ++r) {  // uneven on purpose
    ranges.push_back(
        {r == 0 ? 0 : ranges.back().end,
         r + 1 == num_ranks ? vocab_size : vocab_size * (2 * r + 2) / (2 * num_ranks + 1)});
  }
  return ranges;
}

// Samples on `num_ranks` ranks; every rank must come to the same tokens. The storage has padding
// columns that would win if they were read.
std::vector<int32_t> Sample(const std::vector<std::vector<float>>& logits,
                            const std::vector<SampleRow>& rows, int num_ranks) {
  const int64_t vocab_size = static_cast<int64_t>(logits[0].size());
  const std::vector<Range> ranges = SplitVocab(vocab_size, num_ranks);
  std::vector<std::vector<int32_t>> tokens(static_cast<size_t>(num_ranks));
  const auto statuses = RunLocalRanks(num_ranks, [&](Communicator& communicator) {
    ThreadPool threads(1);
    Sampler sampler(ranges, communicator, threads);
    const Range range = ranges[static_cast<size_t>(communicator.rank())];
    const int64_t stride = range.size() + 3;
    std::vector<float> local(logits.size() * static_cast<size_t>(stride), 1e30f);
    for (size_t row = 0; row < logits.size(); ++row) {
      std::copy_n(logits[row].begin() + range.begin, range.size(),
                  local.begin() + static_cast<int64_t>(row) * stride);
    }
    auto& mine = tokens[static_cast<size_t>(communicator.rank())];
    mine.resize(rows.size());
    return sampler.Sample({.data = local.data(),
                           .dtype = DType::kF32,
                           .rows = static_cast<int64_t>(logits.size()),
                           .cols = range.size(),
                           .stride = stride},
                          rows, mine);
  });
  for (const absl::Status& status : statuses) EXPECT_TRUE(status.ok()) << status;
  for (const auto& other : tokens) EXPECT_EQ(other, tokens[0]);
  return tokens[0];
}

std::vector<float> RandomLogits(int64_t vocab_size, uint32_t seed, float spread) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, spread);
  std::vector<float> logits(static_cast<size_t>(vocab_size));
  for (float& x : logits) x = normal(random);
  return logits;
}

// Exact probabilities by the definition: temperature, top_k, top_p, renormalised.
std::vector<double> Distribution(const std::vector<float>& logits, const SampleRow& row) {
  std::vector<int32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int32_t a, int32_t b) { return logits[a] > logits[b]; });
  if (row.top_k > 0) order.resize(std::min(order.size(), static_cast<size_t>(row.top_k)));
  std::vector<double> weights;
  double total = 0;
  for (const int32_t id : order) {
    weights.push_back(std::exp((logits[id] - double{logits[order[0]]}) / row.temperature));
    total += weights.back();
  }
  std::vector<double> result(logits.size());
  double kept = 0;
  for (size_t i = 0; i < order.size() && (i == 0 || kept < row.top_p * total); ++i) {
    kept += weights[i];
    result[order[i]] = weights[i];
  }
  for (double& p : result) p /= kept;
  return result;
}

// The generator's inverse: the argmax over the support of logit / T + noise, straight from the
// definition.
int32_t ReferenceToken(const std::vector<float>& logits, const SampleRow& row) {
  const std::vector<double> p = Distribution(logits, row);
  int32_t best = -1;
  double best_score = -std::numeric_limits<double>::infinity();
  for (size_t id = 0; id < p.size(); ++id) {
    if (p[id] == 0) continue;
    const double score = logits[id] / row.temperature +
                         GumbelNoise(row.seed, row.position, static_cast<int64_t>(id));
    if (score > best_score) best = static_cast<int32_t>(id), best_score = score;
  }
  return best;
}

TEST(SamplerTest, GreedyTakesTheLargestLowestIdOnTies) {
  std::vector<float> logits(50, 0.0f);
  logits[7] = logits[30] = logits[45] = 2.0f;
  for (int num_ranks = 1; num_ranks <= 4; ++num_ranks) {
    // Whatever top_k, top_p and seed say.
    EXPECT_EQ(
        Sample({logits}, {{.seed = 5, .temperature = 0, .top_p = 0.1, .top_k = 3}}, num_ranks),
        std::vector<int32_t>{7});
  }
  std::vector<float> negative(50, -3.0f);
  negative[49] = -2.0f;
  EXPECT_EQ(Sample({negative}, {{}}, 3), std::vector<int32_t>{49});
}

TEST(SamplerTest, EqualsTheDefinitionAtEveryN) {
  for (const int64_t vocab_size : {5, 64, 1000, 7001}) {
    for (const float spread : {0.1f, 1.0f, 8.0f}) {
      std::vector<std::vector<float>> logits;
      std::vector<SampleRow> rows;
      std::vector<int32_t> expected;
      for (int32_t i = 0; i < 24; ++i) {
        const double temperatures[] = {0.3, 1.0, 2.5};
        const double top_ps[] = {1.0, 0.9, 0.3, 0.999};
        const int64_t top_ks[] = {0, 0, 1, 40, 3000};
        logits.push_back(RandomLogits(vocab_size, static_cast<uint32_t>(i), spread));
        if (i % 3 == 0) {  // a coarse grid has many ties
          for (float& x : logits.back()) x = std::round(x);
        }
        rows.push_back({.logits_row = i,
                        .position = 100 + i,
                        .seed = static_cast<uint64_t>(i / 2),
                        .temperature = temperatures[i % 3],
                        .top_p = top_ps[i % 4],
                        .top_k = top_ks[i % 5]});
        expected.push_back(ReferenceToken(logits.back(), rows.back()));
      }
      for (int num_ranks = 1; num_ranks <= 3; ++num_ranks) {
        EXPECT_EQ(Sample(logits, rows, num_ranks), expected)
            << vocab_size << " " << spread << " " << num_ranks;
      }
    }
  }
}

TEST(SamplerTest, FlatDistributionNeedsMoreCandidates) {
  // 30000 nearly equal logits and top_p 0.97: neither 1024 nor 16384 candidates a rank reach it.
  const std::vector<float> logits = RandomLogits(30000, 1, 0.01f);
  std::vector<std::vector<float>> all(4, logits);
  std::vector<SampleRow> rows;
  std::vector<int32_t> expected;
  for (int32_t i = 0; i < 4; ++i) {
    rows.push_back({.logits_row = i, .position = i, .temperature = 1, .top_p = i % 2 ? 0.3 : 0.97});
    expected.push_back(ReferenceToken(logits, rows.back()));
  }
  for (int num_ranks = 1; num_ranks <= 3; ++num_ranks) {
    EXPECT_EQ(Sample(all, rows, num_ranks), expected);
  }
}

TEST(SamplerTest, RowDoesNotDependOnItsNeighbours) {
  const std::vector<float> logits = RandomLogits(300, 3, 2);
  const SampleRow row{.position = 9, .seed = 77, .temperature = 0.8, .top_p = 0.95};
  const int32_t alone = Sample({logits}, {row}, 1)[0];
  SampleRow moved = row;
  moved.logits_row = 1;
  const std::vector<SampleRow> rows = {
      {.logits_row = 2, .position = 9, .seed = 77, .temperature = 1.5},
      moved,
      {.logits_row = 0, .position = 9, .seed = 77, .temperature = 0}};
  EXPECT_EQ(Sample({RandomLogits(300, 4, 2), logits, RandomLogits(300, 5, 2)}, rows, 2)[1], alone);
}

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

TEST(SamplerTest, FollowsTheDistribution) {
  const std::vector<float> logits = RandomLogits(40, 11, 1.5);
  constexpr int64_t kDraws = 20000;
  const SampleRow settings[] = {{.temperature = 1},
                                {.temperature = 0.5},
                                {.temperature = 2, .top_k = 7},
                                {.temperature = 1, .top_p = 0.8},
                                {.temperature = 1.3, .top_p = 0.7, .top_k = 12}};
  for (const SampleRow& setting : settings) {
    for (const bool vary_seed : {false, true}) {  // else the position
      std::vector<SampleRow> rows;
      for (int32_t i = 0; i < kDraws; ++i) {
        rows.push_back(setting);
        rows.back().seed = vary_seed ? static_cast<uint64_t>(i) : 42;
        rows.back().position = vary_seed ? 3 : i;
      }
      std::map<int32_t, int64_t> counts;
      for (const int32_t token : Sample({logits}, rows, 2)) ++counts[token];
      const std::vector<double> p = Distribution(logits, setting);
      const ChiSquare chi = Compare(counts, p, kDraws);
      // Mean k, variance 2k: 4 standard deviations.
      EXPECT_LT(chi.statistic, chi.degrees + 4 * std::sqrt(2.0 * chi.degrees));
      EXPECT_GT(chi.degrees, 2);
      // Every id of a filtered support that is likely enough was drawn.
      for (size_t id = 0; id < p.size(); ++id) {
        EXPECT_TRUE(p[id] < 0.001 || counts[static_cast<int32_t>(id)] > 0) << id;
      }
    }
  }
}

TEST(SamplerTest, NoiseIsIndependentOfNeighbouringPositionsSeedsAndIds) {
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

TEST(SamplerTest, BadLogitsFailTheirRowAlone) {
  const std::vector<float> good = RandomLogits(60, 1, 1);
  std::vector<std::vector<float>> logits(6, good);
  logits[0][50] = kNan;
  logits[1][3] = kNan;
  logits[2][59] = kInfinity;
  logits[3].assign(60, -kInfinity);
  logits[4][10] = -kInfinity;  // a masked id is no fault
  for (const SampleRow& setting :
       {SampleRow{}, SampleRow{.temperature = 1}, SampleRow{.temperature = 1, .top_p = 0.5},
        SampleRow{.temperature = 1, .top_k = 5}}) {
    std::vector<SampleRow> rows(6, setting);
    for (int32_t i = 0; i < 6; ++i) rows[i].logits_row = i;
    const std::vector<int32_t> first = Sample(logits, rows, 1);
    for (int i = 0; i < 4; ++i) EXPECT_EQ(first[i], kFailedToken) << i;
    EXPECT_GE(first[4], 0);
    EXPECT_GE(first[5], 0);
    EXPECT_EQ(Sample(logits, rows, 2), first);
    EXPECT_EQ(Sample(logits, rows, 3), first);
  }
}

TEST(SamplerTest, MaskedIdsNeverWin) {
  std::vector<float> logits(20, -kInfinity);
  logits[11] = -100;
  for (const SampleRow& setting :
       {SampleRow{}, SampleRow{.temperature = 5}, SampleRow{.temperature = 5, .top_p = 0.5},
        SampleRow{.temperature = 5, .top_k = 5}}) {
    for (uint64_t seed = 0; seed < 20; ++seed) {
      SampleRow row = setting;
      row.seed = seed;
      EXPECT_EQ(Sample({logits}, {row}, 3), std::vector<int32_t>{11});
    }
  }
}

TEST(SamplerTest, TinyTemperatureIsGreedy) {
  const std::vector<float> logits = RandomLogits(100, 2, 1e30f);
  const auto best =
      static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
  for (const double temperature : {1e-300, 1e-9, 1e-3}) {
    EXPECT_EQ(Sample({logits}, {{.temperature = temperature}}, 2), std::vector<int32_t>{best});
    EXPECT_EQ(Sample({logits}, {{.temperature = temperature, .top_p = 0.9}}, 2),
              std::vector<int32_t>{best});
  }
}

}  // namespace
}  // namespace lockstep
