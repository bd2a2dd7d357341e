#include "runtime/scheduler.h"

#include <gtest/gtest.h>

#include <numeric>
#include <random>
#include <set>

#include "runtime/batch_state.h"
#include "runtime/sampler.h"

namespace lockstep {
namespace {

PlanLimits TestLimits(int64_t max_num_batched_tokens, int64_t num_blocks = 64) {
  return {.max_num_batched_tokens = max_num_batched_tokens,
          .max_num_seqs = 4,
          .max_model_len = 100,
          .block_size = 4,
          .num_blocks = num_blocks,
          .vocab_size = 1000,
          .max_logits_rows = 20};
}
constexpr int64_t kScoreRows = 5;

// What a request received.
struct Log {
  std::vector<int32_t> tokens;
  std::vector<FinishReason> finishes;
  std::string error;
  std::optional<int32_t> stop_token;
  std::vector<int64_t> scored;  // positions
};

Request MakeRequest(std::vector<int32_t> prompt, int64_t max_tokens, Log* log) {
  Request request;
  request.prompt = std::move(prompt);
  request.sampling.temperature = 0;
  request.sampling.max_tokens = max_tokens;
  request.on_event = [log](const RequestEvent& event) {
    if (event.token) log->tokens.push_back(*event.token);
    if (event.finish != FinishReason::kNone) log->finishes.push_back(event.finish);
    log->stop_token = event.stop_token;
    log->error = event.error;
    return true;
  };
  return request;
}

// The token a fake model gives after a sequence: a function of the whole sequence, so that a token
// computed twice, left out or attributed to another request shows.
int32_t NextToken(const std::vector<int32_t>& sequence) {
  uint64_t h = 17;
  for (const int32_t t : sequence) h = h * 1000003 + static_cast<uint64_t>(t);
  return static_cast<int32_t>(h % 997);
}

std::vector<int32_t> Generate(std::vector<int32_t> sequence, int64_t count) {
  std::vector<int32_t> tokens;
  for (int64_t i = 0; i < count; ++i) {
    tokens.push_back(NextToken(sequence));
    sequence.push_back(tokens.back());
  }
  return tokens;
}

// Runs a scheduler against a fake model that keeps the "KV cache" per physical slot, and checks
// every plan: budget, distinct slots, one computation a token, and that the decoder and the batch
// state accept it.
class Harness {
 public:
  explicit Harness(const PlanLimits& limits)
      : limits_(limits),
        scheduler_(limits, kScoreRows),
        state_(limits),
        cache_(static_cast<size_t>(limits.num_blocks * limits.block_size), -1) {}

  Scheduler& scheduler() { return scheduler_; }
  const StepPlan& plan() const { return plan_; }

  bool Step() {
    if (!scheduler_.Schedule(plan_)) return false;
    PlanBuffer buffer;
    const int64_t bytes = EncodePlan(plan_, buffer);
    const auto view = DecodePlan({buffer.data(), static_cast<size_t>(bytes)}, limits_);
    EXPECT_TRUE(view.ok()) << view.status();
    if (!view.ok()) return false;
    const absl::Status applied = state_.Apply(*view);
    EXPECT_TRUE(applied.ok()) << applied;
    if (!applied.ok()) return false;
    EXPECT_LE(plan_.num_tokens(), limits_.max_num_batched_tokens);
    std::set<int64_t> slots(plan_.slot_mapping.begin(), plan_.slot_mapping.end());
    EXPECT_EQ(slots.size(), plan_.slot_mapping.size()) << "two tokens write one slot";
    for (size_t t = 0; t < plan_.slot_mapping.size(); ++t) {
      cache_[static_cast<size_t>(plan_.slot_mapping[t])] = plan_.token_ids[t];
    }
    std::vector<int32_t> sampled;
    const std::vector<float> logits(static_cast<size_t>(limits_.vocab_size * kScoreRows), 1.0f);
    for (int64_t b = 0; b < plan_.num_requests(); ++b) {
      const int64_t count = plan_.query_start_loc[b + 1] - plan_.query_start_loc[b];
      if (plan_.outputs[b] == StepOutput::kSample) {
        sampled.push_back(fail_next ? kFailedToken : NextToken(ReadSequence(b)));
      } else if (plan_.outputs[b] == StepOutput::kScore) {
        scheduler_.DeliverPromptLogits(b, plan_.seq_lens[b] - count, count, logits.data());
      }
    }
    scheduler_.Update(sampled);
    EXPECT_TRUE(scheduler_.blocks().CheckInvariants().ok());
    computed_tokens += plan_.num_tokens();
    return true;
  }
  void RunAll() {
    for (int step = 0; Step(); ++step) ASSERT_LT(step, 10000);
    EXPECT_EQ(scheduler_.blocks().num_free(), limits_.num_blocks);
  }

  int64_t computed_tokens = 0;
  bool fail_next = false;

 private:
  // The sequence of the plan's request b, read from the cache through the block table.
  std::vector<int32_t> ReadSequence(int64_t b) const {
    const AttentionBatch& batch = state_.forward_batch().attention;
    std::vector<int32_t> sequence;
    for (int64_t p = 0; p < plan_.seq_lens[b]; ++p) {
      const int64_t block = batch.block_tables[b * batch.max_blocks + p / limits_.block_size];
      sequence.push_back(
          cache_[static_cast<size_t>(block * limits_.block_size + p % limits_.block_size)]);
    }
    return sequence;
  }

  PlanLimits limits_;
  Scheduler scheduler_;
  BatchState state_;
  StepPlan plan_;
  std::vector<int32_t> cache_;
};

std::vector<int32_t> RandomPrompt(std::mt19937& random, int64_t length) {
  std::vector<int32_t> prompt(static_cast<size_t>(length));
  for (int32_t& t : prompt) t = static_cast<int32_t>(random() % 1000);
  return prompt;
}

class SchedulerChunkTest : public testing::TestWithParam<int64_t> {};

TEST_P(SchedulerChunkTest, RandomMixesGiveEachRequestItsOwnTokensOnce) {
  std::mt19937 random(static_cast<uint32_t>(GetParam()));
  for (int mix = 0; mix < 30; ++mix) {
    const int64_t num_blocks = 25 + random() % 40;  // 100 tokens and more
    Harness harness(TestLimits(GetParam(), num_blocks));
    const size_t num_requests = 1 + random() % 12;
    std::vector<Log> logs(num_requests);
    std::vector<std::vector<int32_t>> expected(num_requests);
    std::vector<int64_t> expected_scored(num_requests);
    int64_t expected_tokens = 0;
    for (size_t i = 0; i < num_requests; ++i) {
      const std::vector<int32_t> prompt = RandomPrompt(random, 1 + random() % 60);
      const int64_t max_tokens = 1 + random() % 50;
      const int64_t length = static_cast<int64_t>(prompt.size());
      const int64_t generated = std::min(max_tokens, 100 - length);
      Request request = MakeRequest(prompt, max_tokens, &logs[i]);
      if (random() % 5 == 0) {
        request.on_prompt_logits = [&log = logs[i]](int64_t first, int64_t rows, const float*) {
          for (int64_t row = 0; row < rows; ++row) log.scored.push_back(first + row);
        };
        expected_tokens += length;
        expected_scored[i] = length;
      } else {
        expected[i] = Generate(prompt, generated);
        expected_tokens += length + generated - 1;  // the last token is not fed back
      }
      ASSERT_TRUE(harness.scheduler().Submit(std::move(request)).ok());
      for (uint32_t steps = random() % 3; steps > 0; --steps) harness.Step();
    }
    harness.RunAll();
    EXPECT_EQ(harness.computed_tokens, expected_tokens);
    for (size_t i = 0; i < num_requests; ++i) {
      EXPECT_EQ(logs[i].tokens, expected[i]);
      EXPECT_EQ(logs[i].finishes, std::vector{FinishReason::kLength});
      std::vector<int64_t> positions(static_cast<size_t>(expected_scored[i]));
      std::iota(positions.begin(), positions.end(), 0);
      EXPECT_EQ(logs[i].scored, positions);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Chunks, SchedulerChunkTest, testing::Values(1, 7, 64, 2048));

TEST(SchedulerTest, DecodeAndPrefillShareAStep) {
  Harness harness(TestLimits(10));
  Log first, second;
  std::mt19937 random(1);
  ASSERT_TRUE(harness.scheduler().Submit(MakeRequest({1, 2, 3}, 20, &first)).ok());
  harness.Step();
  ASSERT_TRUE(harness.scheduler().Submit(MakeRequest(RandomPrompt(random, 25), 3, &second)).ok());
  harness.Step();
  EXPECT_EQ(harness.plan().query_start_loc, (std::vector<int32_t>{0, 1, 10}));
  EXPECT_EQ(harness.plan().outputs, (std::vector{StepOutput::kSample, StepOutput::kNone}));
  EXPECT_EQ(harness.scheduler().planned_prompt_tokens(), 9);
  harness.Step();
  EXPECT_EQ(harness.plan().query_start_loc, (std::vector<int32_t>{0, 1, 10}));
  harness.Step();
  EXPECT_EQ(harness.plan().query_start_loc, (std::vector<int32_t>{0, 1, 8}));
  EXPECT_EQ(harness.plan().outputs, (std::vector{StepOutput::kSample, StepOutput::kSample}));
}

TEST(SchedulerTest, FirstComeFirstServedWithoutOvertaking) {
  Harness harness(TestLimits(64, 25));  // 100 tokens
  Log logs[3];
  std::mt19937 random(1);
  // The second does not fit beside the first; the third would, but waits its turn.
  ASSERT_TRUE(harness.scheduler().Submit(MakeRequest(RandomPrompt(random, 40), 20, &logs[0])).ok());
  ASSERT_TRUE(harness.scheduler().Submit(MakeRequest(RandomPrompt(random, 40), 20, &logs[1])).ok());
  ASSERT_TRUE(harness.scheduler().Submit(MakeRequest({1}, 1, &logs[2])).ok());
  harness.Step();
  EXPECT_EQ(harness.scheduler().num_running(), 1);
  EXPECT_EQ(harness.scheduler().num_waiting(), 2);
  while (logs[0].finishes.empty()) {
    EXPECT_TRUE(logs[1].tokens.empty() && logs[2].tokens.empty());
    ASSERT_TRUE(harness.Step());
  }
  harness.Step();
  EXPECT_EQ(logs[1].tokens.size(), 1u);
  EXPECT_EQ(logs[2].tokens.size(), 1u);
  harness.RunAll();
}

TEST(SchedulerTest, AtMostMaxNumSeqsRun) {
  Harness harness(TestLimits(64));
  std::vector<Log> logs(6);
  for (Log& log : logs) ASSERT_TRUE(harness.scheduler().Submit(MakeRequest({1, 2}, 3, &log)).ok());
  harness.Step();
  EXPECT_EQ(harness.scheduler().num_running(), 4);
  harness.RunAll();
  for (const Log& log : logs) EXPECT_EQ(log.tokens, Generate({1, 2}, 3));
}

TEST(SchedulerTest, StopTokenEndsWithoutBeingAToken) {
  const std::vector<int32_t> expected = Generate({5}, 10);
  Harness harness(TestLimits(64));
  Log log;
  Request request = MakeRequest({5}, 10, &log);
  request.sampling.stop_token_ids = {expected[3]};
  ASSERT_TRUE(harness.scheduler().Submit(std::move(request)).ok());
  harness.RunAll();
  EXPECT_EQ(log.tokens, Generate({5}, 3));
  EXPECT_EQ(log.finishes, std::vector{FinishReason::kStop});
  EXPECT_EQ(log.stop_token, expected[3]);
}

TEST(SchedulerTest, CallbackThatReturnsFalseEndsTheRequest) {
  Harness harness(TestLimits(64));
  int events = 0;
  Request request;
  request.prompt = {1, 2, 3};
  request.on_event = [&](const RequestEvent&) { return ++events < 4; };
  ASSERT_TRUE(harness.scheduler().Submit(std::move(request)).ok());
  harness.RunAll();
  EXPECT_EQ(events, 4);
}

TEST(SchedulerTest, CallbackMaySubmit) {
  Harness harness(TestLimits(64));
  Log log;
  Request request;
  request.prompt = {1};
  request.sampling.max_tokens = 1;
  request.on_event = [&](const RequestEvent&) {
    EXPECT_TRUE(harness.scheduler().Submit(MakeRequest({7}, 2, &log)).ok());
    return true;
  };
  ASSERT_TRUE(harness.scheduler().Submit(std::move(request)).ok());
  harness.RunAll();
  EXPECT_EQ(log.tokens, Generate({7}, 2));
}

TEST(SchedulerTest, FailedRowFailsItsRequest) {
  Harness harness(TestLimits(64));
  Log log;
  ASSERT_TRUE(harness.scheduler().Submit(MakeRequest({1, 2}, 5, &log)).ok());
  harness.Step();
  harness.fail_next = true;
  harness.RunAll();
  EXPECT_EQ(log.tokens.size(), 1u);
  EXPECT_EQ(log.finishes, std::vector{FinishReason::kError});
  EXPECT_EQ(log.error, "the logits of position 2 hold NaN or infinity");
}

TEST(SchedulerTest, WhatCanNeverRunIsRefused) {
  PlanLimits limits = TestLimits(64, 10);  // 40 tokens in the pool, length limit 100
  Scheduler scheduler(limits, kScoreRows);
  const auto refusal = [&](std::vector<int32_t> prompt, auto change) {
    Log log;
    Request request = MakeRequest(std::move(prompt), 5, &log);
    change(request);
    const auto id = scheduler.Submit(std::move(request));
    EXPECT_EQ(id.status().code(), absl::StatusCode::kInvalidArgument);
    return std::string(id.status().message());
  };
  const auto nothing = [](Request&) {};
  const auto has = [](const std::string& message, const char* a, const char* b) {
    return message.find(a) != std::string::npos && message.find(b) != std::string::npos;
  };
  std::mt19937 random(1);
  EXPECT_PRED3(has, refusal({}, nothing), "empty", "");
  EXPECT_PRED3(has, refusal({1, 1000}, nothing), "1000", "token 1");
  EXPECT_PRED3(has, refusal({-1}, nothing), "-1", "1000");
  EXPECT_PRED3(has, refusal(RandomPrompt(random, 100), nothing), "100", "no room");
  EXPECT_PRED3(has, refusal(RandomPrompt(random, 36), nothing), "41", "40");
  EXPECT_PRED3(has, refusal({1}, [](Request& r) { r.sampling.temperature = -1; }), "temperature",
               "-1");
  EXPECT_PRED3(has, refusal({1}, [](Request& r) { r.sampling.temperature = 1.0 / 0.0; }),
               "temperature", "inf");
  EXPECT_PRED3(has, refusal({1}, [](Request& r) { r.sampling.top_p = 0; }), "top_p", "0");
  EXPECT_PRED3(has, refusal({1}, [](Request& r) { r.sampling.top_p = 1.5; }), "top_p", "1.5");
  EXPECT_PRED3(has, refusal({1}, [](Request& r) { r.sampling.top_k = -2; }), "top_k", "-2");
  EXPECT_PRED3(has, refusal({1}, [](Request& r) { r.sampling.max_tokens = 0; }), "max_tokens", "0");
  EXPECT_PRED3(has, refusal({1}, [](Request& r) { r.sampling.stop_token_ids = {1000}; }), "1000",
               "stop");
  EXPECT_TRUE(scheduler.idle());
}

TEST(SchedulerTest, LengthIsClippedToTheLimit) {
  Harness harness(TestLimits(64));
  Log log;
  std::mt19937 random(1);
  ASSERT_TRUE(harness.scheduler().Submit(MakeRequest(RandomPrompt(random, 90), 1000, &log)).ok());
  harness.RunAll();
  EXPECT_EQ(log.tokens.size(), 10u);
  EXPECT_EQ(log.finishes, std::vector{FinishReason::kLength});
}

}  // namespace
}  // namespace lockstep
