#include "tests/runtime/sampler_test_util.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>

#include "parallel/local_communicator.h"

namespace lockstep {

namespace {

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

}  // namespace

SampleOutput Sample(const Rows& logits, const std::vector<SampleRow>& rows, int num_ranks,
                    const std::vector<Adjustments>& adjustments, int num_threads) {
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

}  // namespace lockstep
