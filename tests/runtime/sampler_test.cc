#include "runtime/sampler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include "tests/runtime/sampler_test_util.h"

namespace lockstep {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr int kRankCounts[] = {1, 2, 3, 5};

TEST(SamplerTest, GreedyTakesTheLargestLowestIdOnTies) {
  std::vector<float> logits(50, 0.0f);
  logits[7] = logits[30] = logits[45] = 2.0f;
  for (int num_ranks = 1; num_ranks <= 5; ++num_ranks) {
    // Whatever the filters and the seed say.
    const SampleRow row{.seed = 5, .temperature = 0, .top_p = 0.1, .min_p = 0.5, .top_k = 3};
    EXPECT_EQ(Tokens({logits}, {row}, num_ranks), std::vector<int32_t>{7});
  }
  std::vector<float> negative(50, -3.0f);
  negative[49] = -2.0f;
  EXPECT_EQ(Tokens({negative}, {{}}, 3), std::vector<int32_t>{49});
  std::vector<float> zeros(50, -0.0f);  // both zeros are equal
  zeros[20] = 0.0f;
  EXPECT_EQ(Tokens({zeros}, {{}}, 3), std::vector<int32_t>{0});
}

TEST(SamplerTest, NoRowsExchangeNothing) {
  const SampleOutput output = Sample({RandomLogits(10, 1, 1)}, {}, 2);
  EXPECT_TRUE(output.tokens.empty());
  EXPECT_TRUE(output.logprobs.empty());
  EXPECT_TRUE(output.digests.empty());
}

// Random rows of every shape, with random parameters.
struct RandomCase {
  Rows logits;
  std::vector<SampleRow> rows;
  std::vector<int32_t> expected;

  RandomCase(int64_t vocab_size, float spread, uint32_t seed) {
    std::mt19937 random(seed);
    const auto pick = [&](const auto& values) { return values[random() % std::size(values)]; };
    const double temperatures[] = {0, 0.3, 1.0, 1.0, 2.5, 1e4};
    const double top_ps[] = {1.0, 1.0, 0.9, 0.3, 0.999, 1e-9};
    const double min_ps[] = {0, 0, 0.05, 0.7, 1e-4, 1};
    const int64_t top_ks[] = {0, 0, 0, 1, 40, 160, 161, 600, 3000, int64_t{1} << 40};
    while (rows.size() < 40) {
      const auto i = static_cast<int32_t>(rows.size());
      std::vector<float> row_logits = RandomLogits(vocab_size, random(), spread);
      switch (random() % 8) {
        case 0:
        case 1:  // a coarse grid has many ties
          for (float& x : row_logits) x = std::round(x);
          break;
        case 2:
          std::fill(row_logits.begin(), row_logits.end(), 1.25f);
          break;
        case 3:  // most ids are masked
          for (float& x : row_logits) x = random() % 4 == 0 ? x : -kInfinity;
          row_logits[random() % row_logits.size()] = 0.5f;
          break;
        case 4:
          std::sort(row_logits.begin(), row_logits.end());
          break;
      }
      const SampleRow row{.logits_row = i,
                          .position = static_cast<int32_t>(random() % 5000),
                          .seed = random() % 3,
                          .temperature = pick(temperatures),
                          .top_p = pick(top_ps),
                          .min_p = pick(min_ps),
                          .top_k = pick(top_ks)};
      const std::optional<int32_t> token = ReferenceToken(row_logits, row);
      if (!token.has_value()) continue;  // a border that double precision cannot tell
      logits.push_back(std::move(row_logits));
      rows.push_back(row);
      expected.push_back(*token);
    }
  }
};

TEST(SamplerTest, EqualsTheDefinitionAtEveryN) {
  uint32_t seed = 1;
  for (const int64_t vocab_size : {5, 64, 1000, 7001}) {
    for (const float spread : {0.01f, 0.1f, 1.0f, 8.0f}) {
      const RandomCase random_case(vocab_size, spread, ++seed);
      for (const int num_ranks : kRankCounts) {
        EXPECT_EQ(Tokens(random_case.logits, random_case.rows, num_ranks), random_case.expected)
            << vocab_size << " " << spread << " " << num_ranks;
      }
    }
  }
}

TEST(SamplerTest, FlatDistributionsOfALargeVocabulary) {
  // Nearly equal, equal, and spread over a few octaves: the border is found in several rounds.
  for (const float spread : {0.0f, 1e-4f, 0.02f, 2.0f}) {
    Rows all;
    std::vector<SampleRow> rows;
    std::vector<int32_t> expected;
    for (int32_t i = 0; i < 8; ++i) {
      const double top_ps[] = {0.97, 0.3, 0.9999, 1};
      SampleRow row{.logits_row = i,
                    .position = i,
                    .temperature = 1,
                    .top_p = top_ps[i % 4],
                    .min_p = i >= 4 ? 0.9 : 0.0,
                    .top_k = i % 4 == 3 ? 20000 : 0};
      std::vector<float> logits;
      std::optional<int32_t> token;
      for (uint32_t attempt = 0; !token.has_value(); ++attempt) {
        ASSERT_LT(attempt, 100u);
        logits = RandomLogits(40000, 100 * static_cast<uint32_t>(i) + attempt, spread);
        row.top_p = top_ps[i % 4] - attempt * 1e-6;
        token = ReferenceToken(logits, row);
      }
      all.push_back(std::move(logits));
      rows.push_back(row);
      expected.push_back(*token);
    }
    for (const int num_ranks : kRankCounts) {
      EXPECT_EQ(Tokens(all, rows, num_ranks), expected) << spread << " " << num_ranks;
    }
  }
}

// The border of top_k and top_p among equal logits on several ranks: the lowest ids stay.
TEST(SamplerTest, TiesAcrossRankBorders) {
  std::vector<float> logits(3000, 1.0f);
  for (size_t i = 0; i < logits.size(); i += 3) logits[i] = -1.0f;
  logits[2000] = 1.5f;
  std::vector<int32_t> equal;  // in order
  for (int32_t i = 0; i < 3000; ++i) {
    if (i % 3 != 0 && i != 2000) equal.push_back(i);
  }
  for (const int64_t top_k : {2, 100, 170, 900, 1500}) {
    std::vector<SampleRow> rows;
    for (int32_t i = 0; i < 400; ++i) {
      rows.push_back({.position = i, .temperature = 50, .top_k = top_k});
    }
    for (const int num_ranks : kRankCounts) {
      int32_t largest = 0;
      for (const int32_t token : Tokens({logits}, rows, num_ranks)) {
        EXPECT_NE(token % 3, token == 2000 ? 3 : 0);
        if (token != 2000) largest = std::max(largest, token);
      }
      const int32_t border = equal[static_cast<size_t>(top_k) - 2];
      EXPECT_LE(largest, border);
      EXPECT_GE(largest, border * 9 / 10);  // 400 draws of a flat distribution
    }
  }
}

TEST(SamplerTest, RowDependsOnNothingButItself) {
  uint32_t seed = 40;
  for (const double top_p : {0.95, 1.0}) {
    const std::vector<float> logits = RandomLogits(2300, ++seed, 2);
    const SampleRow row{
        .position = 9, .seed = 77, .temperature = 0.8, .top_p = top_p, .num_logprobs = 3};
    const SampleOutput alone = Sample({logits}, {row}, 1);
    SampleRow moved = row;
    moved.logits_row = 1;
    const std::vector<SampleRow> rows = {
        {.logits_row = 2, .position = 9, .seed = 77, .temperature = 1.5, .top_k = 2000},
        moved,
        {.logits_row = 0, .position = 9, .seed = 77, .temperature = 0}};
    const Rows crowd = {RandomLogits(2300, 4, 2), logits, RandomLogits(2300, 5, 2)};
    for (const int num_ranks : kRankCounts) {
      for (const int num_threads : {1, 3}) {
        const SampleOutput output = Sample(crowd, rows, num_ranks, {}, num_threads);
        EXPECT_EQ(output.tokens[1], alone.tokens[0]);
        EXPECT_EQ(output.logprobs[1], alone.logprobs[0]);
        EXPECT_TRUE(output.logprobs[0].top.empty());
      }
    }
  }
}

TEST(SamplerTest, AdjustsAndReportsRawLogprobs) {
  constexpr int64_t kVocab = 900;
  std::mt19937 random(5);
  for (int round = 0; round < 3; ++round) {
    Rows logits;
    std::vector<SampleRow> rows;
    std::vector<Adjustments> adjustments;
    std::vector<int32_t> expected;
    while (rows.size() < 24) {
      Adjustments a;
      if (random() % 2 == 0) a.repetition = 1.3;
      if (random() % 2 == 0) a.frequency = 0.7;
      if (random() % 2 == 0) a.presence = -0.4;
      for (int32_t id = 0; id < 40; ++id) {
        if (random() % 4 == 0) a.bias.push_back({.bias = (random() % 100) * 0.1, .id = id * 20});
      }
      for (int j = 0; j < 10; ++j) a.banned.push_back(static_cast<int32_t>(random() % kVocab));
      a.banned_below = random() % 2 == 0 ? 1000 : 0;
      for (int j = 0; j < 60; ++j) a.history.push_back(static_cast<int32_t>(random() % 300));
      a.prompt_length = 30;
      SampleRow row{.logits_row = static_cast<int32_t>(rows.size()),
                    .position = 60,
                    .seed = random(),
                    .temperature = random() % 3 == 0 ? 0.0 : 1.2,
                    .top_p = random() % 2 == 0 ? 0.9 : 1.0,
                    .top_k = random() % 3 == 0 ? 20 : 0,
                    .num_logprobs = static_cast<int32_t>(random() % 8) - 1};
      std::vector<float> raw = RandomLogits(kVocab, random(), 3);
      const auto token = ReferenceToken(Adjust(raw, a, row.position), row);
      if (!token.has_value()) continue;
      logits.push_back(std::move(raw));
      rows.push_back(row);
      adjustments.push_back(std::move(a));
      expected.push_back(*token);
    }
    for (const int num_ranks : kRankCounts) {
      const SampleOutput output = Sample(logits, rows, num_ranks, adjustments);
      EXPECT_EQ(output.tokens, expected) << num_ranks;
      ASSERT_EQ(output.logprobs.size(), rows.size());
      for (size_t i = 0; i < rows.size(); ++i) {
        const PositionLogprobs& result = output.logprobs[i];
        if (rows[i].num_logprobs < 0) {
          EXPECT_TRUE(result.top.empty());
          continue;
        }
        const std::vector<double> logprobs = ReferenceLogprobs(logits[i]);
        EXPECT_EQ(result.token.id, expected[i]);
        EXPECT_NEAR(result.token.logprob, logprobs[expected[i]], 1e-6);
        ASSERT_EQ(result.top.size(), static_cast<size_t>(rows[i].num_logprobs));
        std::vector<double> sorted = logprobs;
        std::sort(sorted.begin(), sorted.end(), std::greater<>());
        for (size_t j = 0; j < result.top.size(); ++j) {
          EXPECT_NEAR(result.top[j].logprob, sorted[j], 1e-6);
          EXPECT_NEAR(result.top[j].logprob, logprobs[result.top[j].id], 1e-6);
        }
      }
    }
  }
}

const SampleRow kAllKinds[] = {{},
                               {.temperature = 1},
                               {.temperature = 1, .top_p = 0.5},
                               {.temperature = 1, .min_p = 0.1},
                               {.temperature = 1, .top_k = 5},
                               {.temperature = 1, .top_p = 0.9, .min_p = 0.1},
                               {.temperature = 1, .top_p = 0.9, .top_k = 200}};

TEST(SamplerTest, BadLogitsFailTheirRowAlone) {
  const std::vector<float> good = RandomLogits(300, 1, 1);
  Rows logits(7, good);
  logits[0][250] = kNan;
  logits[1][3] = kNan;
  logits[2][299] = kInfinity;
  logits[3].assign(300, -kInfinity);
  logits[4][10] = -kInfinity;  // a masked id is no fault
  logits[5][299] = 3e38f;      // +infinity after the penalty
  logits[5][298] = 3e38f;
  std::vector<Adjustments> adjustments(7);
  adjustments[0].banned = {250};  // hides no fault
  adjustments[0].banned_below = 10;
  adjustments[2].banned = {299};
  adjustments[2].banned_below = 10;
  adjustments[5].history = {299};
  adjustments[5].prompt_length = 1;
  adjustments[5].repetition = 0.5;
  for (SampleRow setting : kAllKinds) {
    for (const int32_t num_logprobs : {-1, 2}) {
      setting.num_logprobs = num_logprobs;
      std::vector<SampleRow> rows(7, setting);
      for (int32_t i = 0; i < 7; ++i) rows[i].logits_row = i;
      const int32_t last = Tokens({good}, {setting}, 1)[0];
      for (const int num_ranks : kRankCounts) {
        const SampleOutput output = Sample(logits, rows, num_ranks, adjustments);
        for (int i : {0, 1, 2, 3, 5}) EXPECT_EQ(output.tokens[i], kFailedToken) << i;
        EXPECT_GE(output.tokens[4], 0);
        EXPECT_EQ(output.tokens[6], last);
        if (num_logprobs < 0) {
          EXPECT_TRUE(output.logprobs.empty());
          continue;
        }
        for (int i : {0, 1, 2, 3, 5}) {
          EXPECT_TRUE(std::isnan(output.logprobs[i].token.logprob)) << i;
          EXPECT_TRUE(output.logprobs[i].top.empty()) << i;
        }
        EXPECT_LT(output.logprobs[6].token.logprob, 0);
        EXPECT_EQ(output.logprobs[6].top.size(), 2u);
      }
    }
  }
}

TEST(SamplerTest, MaskedIdsNeverWin) {
  std::vector<float> logits(400, -kInfinity);
  logits[211] = -100;
  for (const SampleRow& setting : kAllKinds) {
    for (uint64_t seed = 0; seed < 20; ++seed) {
      SampleRow row = setting;
      row.seed = seed;
      if (!row.greedy()) row.temperature = 5;
      EXPECT_EQ(Tokens({logits}, {row}, 3), std::vector<int32_t>{211});
    }
  }
}

TEST(SamplerTest, TinyTemperatureIsGreedy) {
  const std::vector<float> logits = RandomLogits(1000, 2, 1e30f);
  const auto best =
      static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
  for (const double temperature : {1e-300, 1e-9, 1e-3}) {
    for (SampleRow row : kAllKinds) {
      row.temperature = temperature;
      EXPECT_EQ(Tokens({logits}, {row}, 2), std::vector<int32_t>{best});
    }
  }
}

}  // namespace
}  // namespace lockstep
