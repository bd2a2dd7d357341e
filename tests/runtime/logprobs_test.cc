#include "runtime/logprobs.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>

#include "parallel/local_communicator.h"

namespace lockstep {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr int kRankCounts[] = {1, 2, 3, 5};

using Rows = std::vector<std::vector<float>>;

std::vector<PositionLogprobs> Compute(const Rows& logits, const std::vector<LogprobRow>& rows,
                                      int num_ranks) {
  const auto vocab_size = static_cast<int64_t>(logits[0].size());
  std::vector<Range> ranges;
  for (int64_t r = 0; r < num_ranks; ++r) {
    ranges.push_back({vocab_size * r * r / (num_ranks * num_ranks),
                      vocab_size * (r + 1) * (r + 1) / (num_ranks * num_ranks)});
  }
  std::vector<std::vector<PositionLogprobs>> results(static_cast<size_t>(num_ranks));
  const auto statuses = RunLocalRanks(num_ranks, [&](Communicator& communicator) {
    ThreadPool threads(2);
    LogprobComputer computer(ranges, communicator, threads);
    const Range range = ranges[static_cast<size_t>(communicator.rank())];
    const int64_t stride = range.size() + 1;
    std::vector<float> local(logits.size() * static_cast<size_t>(stride), kNan);
    for (size_t row = 0; row < logits.size(); ++row) {
      std::copy_n(logits[row].begin() + range.begin, range.size(),
                  local.begin() + static_cast<int64_t>(row) * stride);
    }
    auto& mine = results[static_cast<size_t>(communicator.rank())];
    mine.assign(rows.size(), {.token = {7, 7}, .top = {{7, 7}}});  // left over
    return computer.Compute({.data = local.data(),
                             .dtype = DType::kF32,
                             .rows = static_cast<int64_t>(logits.size()),
                             .cols = range.size(),
                             .stride = stride},
                            rows, mine);
  });
  for (const absl::Status& status : statuses) EXPECT_TRUE(status.ok()) << status;
  for (const auto& other : results) {
    for (size_t i = 0; i < rows.size(); ++i) {
      EXPECT_EQ(other[i].top, results[0][i].top);
      EXPECT_EQ(std::bit_cast<uint32_t>(other[i].token.logprob),
                std::bit_cast<uint32_t>(results[0][i].token.logprob));
    }
  }
  return results[0];
}

TEST(LogprobsTest, EqualTheDefinitionWithTheSameBitsAtEveryN) {
  std::mt19937 random(1);
  for (const int64_t vocab_size : {25, 700, 9000}) {
    for (const float spread : {0.0f, 0.5f, 5.0f, 60.0f}) {
      Rows logits;
      std::vector<LogprobRow> rows;
      std::normal_distribution<float> normal(0, 1);
      for (int32_t i = 0; i < 12; ++i) {
        const float shift = std::array{0.0f, -300.0f, 45.0f}[i % 3];
        logits.emplace_back();
        for (int64_t id = 0; id < vocab_size; ++id) {
          const float x = normal(random) * spread + shift;
          logits.back().push_back(i % 4 == 0 ? std::round(x) : x);
        }
        if (i % 5 == 0) logits.back()[3] = -kInfinity;
        rows.push_back({.logits_row = i,
                        .token = static_cast<int32_t>(random() % static_cast<uint32_t>(vocab_size)),
                        .num_top = std::array{0, 1, 5, 20, 128}[i % 5]});
      }
      const auto whole = Compute(logits, rows, 1);
      for (size_t i = 0; i < rows.size(); ++i) {
        const std::vector<float>& x = logits[i];
        const double max = *std::max_element(x.begin(), x.end());
        double sum = 0;
        for (const float logit : x) sum += std::exp(logit - max);
        const auto logprob = [&](int32_t id) { return x[id] - max - std::log(sum); };
        std::vector<int32_t> order(x.size());
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(),
                         [&](int32_t a, int32_t b) { return x[a] > x[b]; });
        const double tolerance = 1e-7 * (4 + std::abs(logprob(rows[i].token)));
        EXPECT_EQ(whole[i].token.id, rows[i].token);
        if (x[rows[i].token] == -kInfinity) {
          EXPECT_EQ(whole[i].token.logprob, -kInfinity);
        } else {
          EXPECT_NEAR(whole[i].token.logprob, logprob(rows[i].token), tolerance);
        }
        const auto count = std::min(static_cast<size_t>(rows[i].num_top), x.size());
        ASSERT_EQ(whole[i].top.size(), count);
        for (size_t j = 0; j < count; ++j) {
          EXPECT_EQ(whole[i].top[j].id, order[j]);
          const double expected = logprob(order[j]);
          if (std::isinf(expected)) {
            EXPECT_EQ(whole[i].top[j].logprob, -kInfinity);
          } else {
            EXPECT_NEAR(whole[i].top[j].logprob, expected, 1e-7 * (4 + std::abs(expected)));
          }
        }
      }
      for (const int num_ranks : kRankCounts) EXPECT_EQ(Compute(logits, rows, num_ranks), whole);
    }
  }
}

TEST(LogprobsTest, HugeLogits) {
  const Rows logits = {{1e30f, -1e35f, 1e30f, 9e29f, 0},
                       {-1e30f, -2e30f, -1e30f, -kInfinity, -3e38f}};
  for (const int num_ranks : {1, 2}) {
    const auto results = Compute(logits, {{0, 2, 3}, {1, 0, 1}}, num_ranks);
    EXPECT_FLOAT_EQ(results[0].token.logprob, -std::log(2.0f));
    EXPECT_EQ(results[0].top[0].id, 0);
    EXPECT_EQ(results[0].top[1].id, 2);
    EXPECT_FLOAT_EQ(results[1].token.logprob, -std::log(2.0f));
  }
}

TEST(LogprobsTest, BadRowsHaveNoneAndHarmNoOther) {
  std::vector<float> good(60);
  for (size_t i = 0; i < good.size(); ++i) good[i] = static_cast<float>(i % 7);
  Rows logits(5, good);
  logits[0][59] = kNan;
  logits[1][0] = kInfinity;
  logits[2].assign(60, -kInfinity);
  logits[3][4] = -kInfinity;
  std::vector<LogprobRow> rows;
  for (int32_t i = 0; i < 5; ++i) rows.push_back({.logits_row = i, .token = 1, .num_top = 4});
  for (const int num_ranks : kRankCounts) {
    const auto results = Compute(logits, rows, num_ranks);
    for (size_t i = 0; i < 3; ++i) {
      EXPECT_TRUE(std::isnan(results[i].token.logprob)) << i;
      EXPECT_TRUE(results[i].top.empty()) << i;
    }
    for (size_t i = 3; i < 5; ++i) {
      EXPECT_LT(results[i].token.logprob, 0);
      EXPECT_EQ(results[i].top.size(), 4u);
    }
  }
}

TEST(LogprobsTest, NoRows) { EXPECT_TRUE(Compute({{1, 2, 3}}, {}, 2).empty()); }

}  // namespace
}  // namespace lockstep
