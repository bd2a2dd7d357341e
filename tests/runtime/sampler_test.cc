#include "runtime/sampler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <optional>
#include <random>

#include "parallel/local_communicator.h"

namespace lockstep {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr int kRankCounts[] = {1, 2, 3, 5};

using Rows = std::vector<std::vector<float>>;

std::vector<Range> SplitVocab(int64_t vocab_size, int num_ranks) {
  std::vector<Range> ranges;
  for (int64_t r = 0; r < num_ranks; ++r) {  // uneven on purpose
    ranges.push_back(
        {r == 0 ? 0 : ranges.back().end,
         r + 1 == num_ranks ? vocab_size : vocab_size * (2 * r + 2) / (2 * num_ranks + 1)});
  }
  return ranges;
}

// What a row's adjuster is made of.
struct Adjustments {
  double repetition = 1, frequency = 0, presence = 0;
  std::vector<LogitBias> bias;
  std::vector<int32_t> banned;
  int64_t banned_below = 0;
  std::vector<int32_t> history;
  int64_t prompt_length = 0;
};

// Samples on `num_ranks` ranks; every rank must come to the same. Padding columns hold NaN, which
// would fail the row if they were read. adjustments: empty, or one a row of `rows`.
SampleOutput Sample(const Rows& logits, const std::vector<SampleRow>& rows, int num_ranks,
                    const std::vector<Adjustments>& adjustments = {}, int num_threads = 1) {
  const auto vocab_size = static_cast<int64_t>(logits[0].size());
  const std::vector<Range> ranges = SplitVocab(vocab_size, num_ranks);
  std::vector<SampleOutput> outputs(static_cast<size_t>(num_ranks));
  const auto statuses = RunLocalRanks(num_ranks, [&](Communicator& communicator) {
    ThreadPool threads(num_threads);
    Sampler sampler(ranges, communicator, threads);
    const Range range = ranges[static_cast<size_t>(communicator.rank())];
    const int64_t stride = range.size() + 3;
    std::vector<float> local(logits.size() * static_cast<size_t>(stride), kNan);
    for (size_t row = 0; row < logits.size(); ++row) {
      std::copy_n(logits[row].begin() + range.begin, range.size(),
                  local.begin() + static_cast<int64_t>(row) * stride);
    }
    std::vector<LogitAdjuster> adjusters;
    for (const Adjustments& a : adjustments) {
      adjusters.emplace_back(range,
                             LogitAdjustments{.repetition_penalty = a.repetition,
                                              .frequency_penalty = a.frequency,
                                              .presence_penalty = a.presence,
                                              .bias = a.bias,
                                              .banned_ids = a.banned,
                                              .banned_below = a.banned_below},
                             a.history, a.prompt_length);
    }
    std::vector<SampleRow> mine = rows;
    for (size_t i = 0; i < adjusters.size(); ++i) mine[i].adjuster = &adjusters[i];
    const MatrixView view{.data = local.data(),
                          .dtype = DType::kF32,
                          .rows = static_cast<int64_t>(logits.size()),
                          .cols = range.size(),
                          .stride = stride};
    SampleOutput& output = outputs[static_cast<size_t>(communicator.rank())];
    // Left over from another step.
    output.tokens.assign(3, 99);
    output.logprobs.resize(1);
    output.digests.assign(7, 1);
    return sampler.Sample(view, mine, 1000 + static_cast<uint64_t>(communicator.rank()), output);
  });
  for (const absl::Status& status : statuses) EXPECT_TRUE(status.ok()) << status;
  for (const SampleOutput& other : outputs) {
    EXPECT_EQ(other.tokens, outputs[0].tokens);
    EXPECT_EQ(other.digests, outputs[0].digests);
    EXPECT_EQ(other.logprobs.size(), outputs[0].logprobs.size());
    for (size_t i = 0; i < other.logprobs.size(); ++i) {
      const float a = other.logprobs[i].token.logprob, b = outputs[0].logprobs[i].token.logprob;
      EXPECT_TRUE(a == b || (std::isnan(a) && std::isnan(b)));
      EXPECT_EQ(other.logprobs[i].top, outputs[0].logprobs[i].top);
    }
  }
  if (!rows.empty()) {
    std::vector<uint64_t> digests(static_cast<size_t>(num_ranks));
    std::iota(digests.begin(), digests.end(), 1000);
    EXPECT_EQ(outputs[0].digests, digests);
  }
  return outputs[0];
}
std::vector<int32_t> Tokens(const Rows& logits, const std::vector<SampleRow>& rows, int num_ranks) {
  return Sample(logits, rows, num_ranks).tokens;
}

std::vector<float> RandomLogits(int64_t vocab_size, uint32_t seed, float spread) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, spread);
  std::vector<float> logits(static_cast<size_t>(vocab_size));
  for (float& x : logits) x = normal(random);
  return logits;
}

// --- The definition, in double precision ---

std::vector<float> Adjust(std::vector<float> logits, const Adjustments& a, int64_t position) {
  std::vector<int> in_prompt(logits.size()), generated(logits.size());
  for (size_t i = 0; i < a.history.size(); ++i) {
    ++(static_cast<int64_t>(i) < a.prompt_length ? in_prompt : generated)[a.history[i]];
  }
  for (size_t id = 0; id < logits.size(); ++id) {
    double x = logits[id];
    for (const LogitBias& bias : a.bias) {
      if (bias.id == static_cast<int32_t>(id)) x += bias.bias;
    }
    const bool banned = std::count(a.banned.begin(), a.banned.end(), static_cast<int32_t>(id)) > 0;
    if (banned && position < a.banned_below) x = -std::numeric_limits<double>::infinity();
    if (in_prompt[id] + generated[id] > 0) x = x > 0 ? x / a.repetition : x * a.repetition;
    x -= a.frequency * generated[id];
    if (generated[id] > 0) x -= a.presence;
    logits[id] = static_cast<float>(x);
  }
  return logits;
}

// Exact probabilities: temperature, min_p, top_k, top_p, renormalised. None when a border is too
// close to tell in double precision.
std::optional<std::vector<double>> Distribution(const std::vector<float>& logits,
                                                const SampleRow& row) {
  std::vector<int32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int32_t a, int32_t b) { return logits[a] > logits[b]; });
  const auto weight = [&](int32_t id) {
    return std::exp((logits[id] - double{logits[order[0]]}) / row.temperature);
  };
  size_t count = 0;
  while (count < order.size() && weight(order[count]) >= row.min_p) ++count;
  if (row.min_p > 0) {
    for (const int32_t id : order) {
      if (id != order[0] && logits[id] != logits[order[0]] &&
          std::abs(weight(id) / row.min_p - 1) < 1e-9) {
        return std::nullopt;
      }
    }
    order.resize(count);
  }
  if (row.top_k > 0) order.resize(std::min(order.size(), static_cast<size_t>(row.top_k)));
  double total = 0;
  for (const int32_t id : order) total += weight(id);
  std::vector<double> result(logits.size());
  double kept = 0;
  for (size_t i = 0; i < order.size() && (i == 0 || row.top_p >= 1 || kept < row.top_p * total);
       ++i) {
    kept += weight(order[i]);
    result[order[i]] = weight(order[i]);
    if (row.top_p < 1 && std::abs(kept / total - row.top_p) < 5e-8) return std::nullopt;
  }
  for (double& p : result) p /= kept;
  return result;
}

// The argmax over the support of logit / T + noise, straight from the definition.
std::optional<int32_t> ReferenceToken(const std::vector<float>& logits, const SampleRow& row) {
  if (row.temperature == 0) {
    return static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
  }
  const auto p = Distribution(logits, row);
  if (!p.has_value()) return std::nullopt;
  int32_t best = -1;
  double best_score = -std::numeric_limits<double>::infinity();
  for (size_t id = 0; id < p->size(); ++id) {
    if ((*p)[id] == 0) continue;
    const double score = logits[id] / row.temperature +
                         GumbelNoise(row.seed, row.position, static_cast<int64_t>(id));
    if (score > best_score) best = static_cast<int32_t>(id), best_score = score;
  }
  return best;
}

std::vector<double> ReferenceLogprobs(const std::vector<float>& logits) {
  const double max = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float x : logits) sum += std::exp(x - max);
  std::vector<double> result;
  for (const float x : logits) result.push_back(x - max - std::log(sum));
  return result;
}

// --- Tests ---

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
