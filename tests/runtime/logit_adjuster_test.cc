#include "runtime/logit_adjuster.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <random>

namespace lockstep {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

std::vector<float> RandomLogits(int64_t count, std::mt19937& random) {
  std::normal_distribution<float> normal(0, 4);
  std::vector<float> logits(static_cast<size_t>(count));
  for (float& x : logits) x = normal(random);
  return logits;
}

TEST(LogitAdjusterTest, OrderOfTheAdjustments) {
  const LogitBias bias[] = {{.bias = 3, .id = 0}, {.bias = -5, .id = 1}, {.bias = 2, .id = 2}};
  const int32_t banned[] = {2};
  // 0 in the prompt alone; 1 generated twice; 2 banned and generated; 3 both; 4 untouched.
  const int32_t history[] = {0, 3, 3, 1, 2, 1, 3};
  LogitAdjuster adjuster({0, 5},
                         {.repetition_penalty = 2,
                          .frequency_penalty = 0.5,
                          .presence_penalty = 0.25,
                          .bias = bias,
                          .banned_ids = banned,
                          .banned_below = 8},
                         history, 3);
  std::vector<float> logits = {1, 2, 9, -4, 7};
  adjuster.Apply(7, logits.data());
  EXPECT_EQ(logits, (std::vector<float>{(1 + 3) / 2.0f, (2 - 5) * 2 - 2 * 0.5f - 0.25f, -kInfinity,
                                        -4 * 2 - 0.5f - 0.25f, 7}));
  // From banned_below on, the ban is over.
  logits = {1, 2, 9, -4, 7};
  adjuster.Apply(8, logits.data());
  EXPECT_EQ(logits[2], (9 + 2) / 2.0f - 0.5f - 0.25f);
}

TEST(LogitAdjusterTest, FaultsStay) {
  const int32_t ids[] = {0, 1, 2};
  LogitAdjuster adjuster(
      {0, 3}, {.repetition_penalty = 1.5, .bias = {}, .banned_ids = ids, .banned_below = 9}, ids,
      3);
  std::vector<float> logits = {std::numeric_limits<float>::quiet_NaN(), kInfinity, -kInfinity};
  adjuster.Apply(3, logits.data());
  EXPECT_TRUE(std::isnan(logits[0]));
  EXPECT_EQ(logits[1], kInfinity);
  EXPECT_EQ(logits[2], -kInfinity);
}

// Parts of the vocabulary give the same as the whole; Add the same as a longer history.
TEST(LogitAdjusterTest, PartsAndAddEqualTheWhole) {
  constexpr int64_t kVocab = 3000;
  std::mt19937 random(3);
  for (int round = 0; round < 20; ++round) {
    std::vector<int32_t> history;
    for (int i = 0; i < 700; ++i) history.push_back(static_cast<int32_t>(random() % kVocab));
    std::map<int32_t, double> biases;
    for (int i = 0; i < 50; ++i) biases[static_cast<int32_t>(random() % kVocab)] = i - 25;
    std::vector<LogitBias> bias;
    for (const auto& [id, value] : biases) bias.push_back({.bias = value, .id = id});
    const std::vector<int32_t> banned = {1, 5, 2999, 1500};
    const LogitAdjustments adjustments{.repetition_penalty = round % 2 == 0 ? 1.0 : 1.1,
                                       .frequency_penalty = round % 3 == 0 ? 0.0 : 0.2,
                                       .presence_penalty = round % 5 == 0 ? 0.0 : -0.3,
                                       .bias = bias,
                                       .banned_ids = banned,
                                       .banned_below = 5000};
    const std::vector<float> raw = RandomLogits(kVocab, random);
    std::vector<float> whole = raw;
    LogitAdjuster(Range{0, kVocab}, adjustments, history, 300).Apply(1000, whole.data());

    // The definition.
    std::vector<int> prompt(kVocab), generated(kVocab);
    for (size_t i = 0; i < history.size(); ++i) ++(i < 300 ? prompt : generated)[history[i]];
    for (int32_t id = 0; id < kVocab; ++id) {
      double x = raw[id] + (biases.contains(id) ? biases[id] : 0.0);
      if (std::count(banned.begin(), banned.end(), id) > 0) x = -kInfinity;
      if (prompt[id] + generated[id] > 0) {
        x = x > 0 ? x / adjustments.repetition_penalty : x * adjustments.repetition_penalty;
      }
      x -= adjustments.frequency_penalty * generated[id];
      x -= generated[id] > 0 ? adjustments.presence_penalty : 0;
      if (std::isinf(x)) {
        EXPECT_EQ(whole[id], -kInfinity);
      } else {
        EXPECT_NEAR(whole[id], x, 1e-5);
      }
    }

    std::vector<float> parts = raw;
    for (const Range range : {Range{0, 1}, Range{1, 1700}, Range{1700, kVocab}}) {
      LogitAdjuster part(range, adjustments, std::span(history).first(400), 300);
      for (const int32_t id : std::span(history).subspan(400)) part.Add(id);
      std::vector<float> before;
      float* logits = parts.data() + range.begin;
      part.Apply(1000, logits, &before);
      for (int64_t id = range.begin; id < range.end; ++id) {
        EXPECT_EQ(part.RawLogit(static_cast<int32_t>(id), logits, before), raw[id]);
      }
    }
    EXPECT_EQ(parts, whole);
  }
}

}  // namespace
}  // namespace lockstep
