// Random mixes of requests: every choice gets its own tokens, once, whatever the schedule.
#include <gtest/gtest.h>

#include <numeric>
#include <random>

#include "tests/runtime/scheduler_harness.h"

namespace lockstep {
namespace {

// One request of a random mix, and what each of its choices has to get.
struct MixRequest {
  Request request;
  std::vector<Log> logs;
  std::vector<std::vector<int32_t>> expected;  // by choice
  int64_t expected_rows = 0;                   // scored, or with prompt logprobs
  bool scored = false;
  bool cancelled = false;
  RequestId id = 0;
};

MixRequest DrawRequest(std::mt19937& random, const std::vector<std::vector<int32_t>>& prefixes) {
  MixRequest mix;
  std::vector<int32_t> prompt;
  if (random() % 2 == 0) prompt = prefixes[random() % prefixes.size()];
  const std::vector<int32_t> rest = RandomPrompt(random, 1 + random() % 30);
  prompt.insert(prompt.end(), rest.begin(), rest.end());
  const int64_t length = std::ssize(prompt);
  const int64_t max_tokens = 1 + random() % 40;
  mix.scored = random() % 8 == 0;
  const int32_t n = !mix.scored && random() % 4 == 0 ? 1 + random() % 5 : 1;
  mix.logs.resize(static_cast<size_t>(n));
  mix.request = MakeRequest(prompt, max_tokens, nullptr);
  mix.request.priority = static_cast<int32_t>(random() % 3);
  mix.request.cache_salt = random() % 5 == 0 ? "salt" : "";
  SamplingParams& sampling = mix.request.sampling;
  sampling.n = n;
  sampling.seed = random() % 2;
  if (mix.scored) {
    mix.expected_rows = length;
    mix.expected.resize(1);
    return mix;
  }
  if (random() % 5 == 0) {
    sampling.num_prompt_logprobs = 0;
    mix.expected_rows = length - 1;
  }
  for (int32_t i = 0; i < n; ++i) {
    mix.expected.push_back(Generate(prompt, std::min(max_tokens, 100 - length), sampling.seed + i));
  }
  return mix;
}

void Submit(Harness& harness, MixRequest& mix) {
  Request request = mix.request;
  request.on_event = MakeRequest({}, 1, mix.logs.data()).on_event;
  if (mix.scored) {
    request.on_prompt_logits = [&log = mix.logs[0]](int64_t first, int64_t rows, const float*) {
      for (int64_t row = 0; row < rows; ++row) log.scored.push_back(first + row);
    };
  }
  request.on_prompt_logprobs = [&log = mix.logs[0]](int64_t first,
                                                    std::span<const PositionLogprobs> logprobs) {
    EXPECT_EQ(first, std::ssize(log.prompt_logprobs) + 1);
    for (const PositionLogprobs& p : logprobs) log.prompt_logprobs.push_back(p.token.id);
  };
  const auto id = harness.Submit(std::move(request));
  ASSERT_TRUE(id.ok()) << id.status();
  mix.id = *id;
}

void ExpectServed(const MixRequest& mix) {
  const std::vector<int32_t>& prompt = mix.request.prompt;
  for (size_t i = 0; i < mix.logs.size(); ++i) {
    const Log& log = mix.logs[i];
    ASSERT_EQ(log.finishes.size(), 1u);
    if (log.finishes[0] == FinishReason::kCancelled) {
      EXPECT_TRUE(mix.cancelled);
      ASSERT_LE(log.tokens.size(), mix.expected[i].size());
      EXPECT_TRUE(std::equal(log.tokens.begin(), log.tokens.end(), mix.expected[i].begin()));
      continue;
    }
    EXPECT_EQ(log.finishes[0], FinishReason::kLength);
    EXPECT_EQ(log.tokens, mix.expected[i]) << "request " << mix.id << " choice " << i;
    if (i > 0) continue;
    std::vector<int64_t> positions(static_cast<size_t>(mix.scored ? mix.expected_rows : 0));
    std::iota(positions.begin(), positions.end(), 0);
    EXPECT_EQ(log.scored, positions);
    if (mix.request.sampling.num_prompt_logprobs.has_value()) {
      EXPECT_EQ(log.prompt_logprobs, std::vector<int32_t>(prompt.begin() + 1, prompt.end()));
    }
  }
}

struct MixCase {
  int64_t chunk;
  int steps_in_flight;
  bool prefix_caching;
};

class SchedulerMixTest : public testing::TestWithParam<MixCase> {};

TEST_P(SchedulerMixTest, RandomMixesGiveEachChoiceItsOwnTokensOnce) {
  const MixCase& param = GetParam();
  std::mt19937 random(static_cast<uint32_t>(param.chunk * 10 + param.steps_in_flight));
  int64_t preemptions = 0;
  int64_t hits = 0;
  for (int round = 0; round < 40; ++round) {
    SchedulerOptions options = TestOptions();
    options.enable_prefix_caching = param.prefix_caching;
    const int64_t num_blocks = 25 + random() % 20;  // 100 tokens and more
    Harness harness(TestLimits(param.chunk, num_blocks), options, param.steps_in_flight);
    std::vector<std::vector<int32_t>> prefixes;
    for (int i = 0; i < 3; ++i) prefixes.push_back(RandomPrompt(random, 1 + random() % 40));
    std::vector<MixRequest> mixes(1 + random() % 14);
    for (MixRequest& mix : mixes) {
      mix = DrawRequest(random, prefixes);
      Submit(harness, mix);
      for (uint32_t steps = random() % 4; steps > 0; --steps) harness.Step();
      MixRequest& victim = mixes[random() % mixes.size()];
      if (random() % 8 == 0 && victim.id != 0) {
        victim.cancelled = true;
        harness.scheduler().Cancel(victim.id);
      }
    }
    harness.RunAll();
    for (const MixRequest& mix : mixes) ExpectServed(mix);
    preemptions += harness.scheduler().stats().num_preemptions;
    hits += harness.scheduler().stats().prefix_cache_hit_tokens;
  }
  if (param.chunk > 1) {  // one token a step: hardly two requests ever run
    EXPECT_GT(preemptions, 10) << "the test is blind for preemption";
  }
  if (param.prefix_caching) {
    EXPECT_GT(hits, 200) << "the test is blind for prefix hits";
  }
}

INSTANTIATE_TEST_SUITE_P(Mixes, SchedulerMixTest,
                         testing::Values(MixCase{1, 1, true}, MixCase{7, 1, true},
                                         MixCase{64, 1, true}, MixCase{2048, 1, false},
                                         MixCase{1, 2, true}, MixCase{7, 2, true},
                                         MixCase{64, 2, true}, MixCase{64, 2, false}));

}  // namespace
}  // namespace lockstep
