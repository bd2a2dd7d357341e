#include "runtime/scheduler.h"

#include <gtest/gtest.h>

#include <limits>
#include <random>
#include <string>

#include "tests/runtime/scheduler_harness.h"

namespace lockstep {
namespace {

TEST(SchedulerTest, DecodeAndPrefillShareAStep) {
  Harness harness(TestLimits(10));
  Log first, second;
  std::mt19937 random(1);
  ASSERT_TRUE(harness.Submit(MakeRequest({1, 2, 3}, 20, &first)).ok());
  harness.Step();
  ASSERT_TRUE(harness.Submit(MakeRequest(RandomPrompt(random, 25), 3, &second)).ok());
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
  // The second's prompt does not fit beside the first's; the third's would, but waits its turn.
  ASSERT_TRUE(harness.Submit(MakeRequest(RandomPrompt(random, 50), 20, &logs[0])).ok());
  ASSERT_TRUE(harness.Submit(MakeRequest(RandomPrompt(random, 60), 20, &logs[1])).ok());
  ASSERT_TRUE(harness.Submit(MakeRequest({1}, 1, &logs[2])).ok());
  harness.Step();
  EXPECT_EQ(harness.scheduler().stats().num_running, 1);
  EXPECT_EQ(harness.scheduler().stats().num_waiting, 2);
  while (logs[0].finishes.empty()) {
    EXPECT_TRUE(logs[1].tokens.empty() && logs[2].tokens.empty());
    ASSERT_TRUE(harness.Step());
  }
  harness.Step();
  EXPECT_EQ(logs[1].tokens.size(), 1u);
  EXPECT_EQ(logs[2].tokens.size(), 1u);
  harness.RunAll();
}

TEST(SchedulerTest, LowerPriorityValuesGoFirst) {
  PlanLimits limits = TestLimits(64);
  limits.max_num_seqs = 1;
  Harness harness(limits);
  std::vector<int> order;
  int submitted = 0;
  for (const int32_t priority : {5, 5, -1, 0}) {
    Request request;
    request.prompt = {1};
    request.sampling.max_tokens = 1;
    request.priority = priority;
    request.on_event = [&order, i = submitted++](const RequestEvent&) {
      order.push_back(i);
      return true;
    };
    ASSERT_TRUE(harness.Submit(std::move(request)).ok());
  }
  harness.RunAll();
  EXPECT_EQ(order, (std::vector<int>{2, 3, 0, 1}));
}

TEST(SchedulerTest, TheLastInOrderIsPreemptedAndLosesNothing) {
  Harness harness(TestLimits(64, 25));  // 100 tokens
  Log logs[2];
  std::mt19937 random(1);
  const std::vector<int32_t> prompts[] = {RandomPrompt(random, 30), RandomPrompt(random, 30)};
  for (int i = 0; i < 2; ++i) {
    ASSERT_TRUE(harness.Submit(MakeRequest(prompts[i], 40, &logs[i])).ok());
  }
  while (harness.scheduler().stats().num_preemptions == 0) ASSERT_TRUE(harness.Step());
  EXPECT_EQ(harness.scheduler().stats().num_running, 1);
  harness.RunAll();
  for (int i = 0; i < 2; ++i) EXPECT_EQ(logs[i].tokens, Generate(prompts[i], 40));
  EXPECT_EQ(harness.scheduler().stats().num_preemptions, 1);
}

TEST(SchedulerTest, FullBlocksOfAKnownPrefixAreNotComputedAgain) {
  Harness harness(TestLimits(64));
  std::mt19937 random(1);
  std::vector<int32_t> prompt = RandomPrompt(random, 16);
  Log logs[5];
  ASSERT_TRUE(harness.Submit(MakeRequest(prompt, 1, &logs[0])).ok());
  harness.RunAll();
  EXPECT_EQ(harness.computed_tokens, 16);
  // The same prompt: the last of its four blocks holds the token that has to be computed.
  ASSERT_TRUE(harness.Submit(MakeRequest(prompt, 1, &logs[1])).ok());
  harness.RunAll();
  EXPECT_EQ(harness.computed_tokens, 16 + 4);
  // Longer: all four blocks.
  prompt.push_back(3);
  ASSERT_TRUE(harness.Submit(MakeRequest(prompt, 1, &logs[2])).ok());
  harness.RunAll();
  EXPECT_EQ(harness.computed_tokens, 20 + 1);
  // Another salt, or prompt logprobs: nothing is shared.
  Request salted = MakeRequest(prompt, 1, &logs[3]);
  salted.cache_salt = "pepper";
  ASSERT_TRUE(harness.Submit(std::move(salted)).ok());
  harness.RunAll();
  EXPECT_EQ(harness.computed_tokens, 21 + 17);
  Request logprobs = MakeRequest(prompt, 1, &logs[4]);
  logprobs.sampling.num_prompt_logprobs = 1;
  ASSERT_TRUE(harness.Submit(std::move(logprobs)).ok());
  harness.RunAll();
  EXPECT_EQ(harness.computed_tokens, 38 + 17);
  EXPECT_EQ(logs[2].tokens, logs[3].tokens);
  EXPECT_EQ(logs[2].tokens, logs[4].tokens);
  EXPECT_EQ(harness.scheduler().stats().prefix_cache_hit_tokens, 12 + 16);
}

// With dynamic RoPE the keys of a prompt beyond the trained length depend on its length.
TEST(SchedulerTest, PromptsBeyondTheSharedLengthShareNothing) {
  SchedulerOptions options = TestOptions();
  options.max_shared_tokens = 20;
  Harness harness(TestLimits(64), options);
  std::mt19937 random(1);
  const std::vector<int32_t> prompt = RandomPrompt(random, 40);
  Log logs[3];
  for (Log& log : logs) {
    const bool longer = &log == &logs[2];
    const int64_t length = longer ? 21 : 18;
    ASSERT_TRUE(
        harness.Submit(MakeRequest({prompt.begin(), prompt.begin() + length}, 10, &log)).ok());
    harness.RunAll();
  }
  EXPECT_EQ(harness.computed_tokens, (18 + 9) + (2 + 9) + (21 + 9));
}

TEST(SchedulerTest, ChoicesShareThePrompt) {
  for (const int64_t length : {1, 7, 8, 9}) {
    Harness harness(TestLimits(64));
    std::mt19937 random(1);
    const std::vector<int32_t> prompt = RandomPrompt(random, length);
    Log logs[3];
    Request request = MakeRequest(prompt, 6, logs);
    request.sampling.n = 3;
    ASSERT_TRUE(harness.Submit(std::move(request)).ok());
    harness.RunAll();
    for (uint64_t i = 0; i < 3; ++i) EXPECT_EQ(logs[i].tokens, Generate(prompt, 6, i));
    // Each of the others computes the prompt's last token only.
    EXPECT_EQ(harness.computed_tokens, length + 2 + 3 * 5);
  }
}

TEST(SchedulerTest, CancelEndsEveryChoiceAndFreesItsBlocks) {
  for (const int steps_in_flight : {1, 2}) {
    Harness harness(TestLimits(64), TestOptions(), steps_in_flight);
    Log logs[6];
    Request request = MakeRequest({1, 2, 3}, 50, logs);
    request.sampling.n = 6;  // four run, two wait
    const auto id = harness.Submit(std::move(request));
    ASSERT_TRUE(id.ok());
    for (int i = 0; i < 4; ++i) harness.Step();
    harness.scheduler().Cancel(*id);
    harness.scheduler().Cancel(*id);
    harness.scheduler().Cancel(12345);
    for (const Log& log : logs) {
      EXPECT_EQ(log.finishes, std::vector{FinishReason::kCancelled});
    }
    EXPECT_EQ(harness.scheduler().stats().num_free_blocks, 64);
    harness.RunAll();
  }
}

// Its place in the queue is kept while its last step is on its way.
TEST(SchedulerTest, WhoWasPreemptedIsNotOvertaken) {
  for (const int steps_in_flight : {1, 2}) {
    SchedulerOptions options = TestOptions();
    options.enable_prefix_caching = false;
    Harness harness(TestLimits(32, 30), options, steps_in_flight);
    std::string order;  // of their ends
    const auto submit = [&](char name, int64_t length, int64_t max_tokens) {
      Request request;
      request.prompt.assign(static_cast<size_t>(length), 1);
      request.sampling.max_tokens = max_tokens;
      request.on_event = [&order, name](const RequestEvent& event) {
        if (event.finish != FinishReason::kNone) order.push_back(name);
        return true;
      };
      ASSERT_TRUE(harness.Submit(std::move(request)).ok());
    };
    submit('a', 20, 70);
    submit('b', 60, 30);
    submit('c', 36, 40);
    harness.RunAll();
    EXPECT_GT(harness.scheduler().stats().num_preemptions, 0);
    EXPECT_EQ(order, "abc") << steps_in_flight;
  }
}

// Two equal prompts, of which the pool holds one: the second shares the first one's blocks while
// that still runs.
TEST(SchedulerTest, WhoDidNotFitMayFitOnceItsPrefixIsKnown) {
  Harness harness(TestLimits(256, 25));
  std::mt19937 random(1);
  const std::vector<int32_t> prompt = RandomPrompt(random, 60);
  Log logs[2];
  for (Log& log : logs) ASSERT_TRUE(harness.Submit(MakeRequest(prompt, 20, &log)).ok());
  harness.Step();
  EXPECT_EQ(harness.scheduler().stats().num_running, 1);
  harness.Step();
  EXPECT_EQ(harness.scheduler().stats().num_running, 2);
  harness.RunAll();
  for (const Log& log : logs) EXPECT_EQ(log.tokens, Generate(prompt, 20));
}

TEST(SchedulerTest, MinTokensBansTheEndsInThePlan) {
  SchedulerOptions options = TestOptions();
  options.end_token_ids = {7, 8};
  Harness harness(TestLimits(64), options);
  Log log;
  Request request = MakeRequest({1, 2, 3}, 9, &log);
  request.sampling.min_tokens = 5;
  request.sampling.stop_token_ids = {11};
  ASSERT_TRUE(harness.Submit(std::move(request)).ok());
  harness.Step();
  EXPECT_EQ(harness.plan().banned_ids, (std::vector<int32_t>{11, 7, 8}));
  EXPECT_EQ(harness.plan().new_requests[0].banned_below, 3 + 5);
  harness.RunAll();
}

TEST(SchedulerTest, EndTokensEndUnlessIgnored) {
  const std::vector<int32_t> expected = Generate({5}, 10);
  SchedulerOptions options = TestOptions();
  options.end_token_ids = {expected[2]};
  for (const int steps_in_flight : {1, 2}) {
    Harness harness(TestLimits(64), options, steps_in_flight);
    Log ended, ignored;
    ASSERT_TRUE(harness.Submit(MakeRequest({5}, 10, &ended)).ok());
    Request request = MakeRequest({5}, 10, &ignored);
    request.sampling.ignore_eos = true;
    ASSERT_TRUE(harness.Submit(std::move(request)).ok());
    harness.RunAll();
    EXPECT_EQ(ended.tokens, Generate({5}, 2));
    EXPECT_EQ(ended.stop_token, expected[2]);
    EXPECT_EQ(ignored.tokens, expected);
  }
}

TEST(SchedulerTest, AtMostMaxNumSeqsRun) {
  Harness harness(TestLimits(64));
  std::vector<Log> logs(6);
  for (Log& log : logs) ASSERT_TRUE(harness.Submit(MakeRequest({1, 2}, 3, &log)).ok());
  harness.Step();
  EXPECT_EQ(harness.scheduler().stats().num_running, 4);
  harness.RunAll();
  for (const Log& log : logs) EXPECT_EQ(log.tokens, Generate({1, 2}, 3));
}

TEST(SchedulerTest, StopTokenEndsWithoutBeingAToken) {
  const std::vector<int32_t> expected = Generate({5}, 10);
  Harness harness(TestLimits(64));
  Log log;
  Request request = MakeRequest({5}, 10, &log);
  request.sampling.stop_token_ids = {expected[3]};
  ASSERT_TRUE(harness.Submit(std::move(request)).ok());
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
  ASSERT_TRUE(harness.Submit(std::move(request)).ok());
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
    EXPECT_TRUE(harness.Submit(MakeRequest({7}, 2, &log)).ok());
    return true;
  };
  ASSERT_TRUE(harness.Submit(std::move(request)).ok());
  harness.RunAll();
  EXPECT_EQ(log.tokens, Generate({7}, 2));
}

TEST(SchedulerTest, FailedRowFailsItsRequest) {
  Harness harness(TestLimits(64));
  Log log;
  ASSERT_TRUE(harness.Submit(MakeRequest({1, 2}, 5, &log)).ok());
  harness.Step();
  harness.fail_next = true;
  harness.RunAll();
  EXPECT_EQ(log.tokens.size(), 1u);
  EXPECT_EQ(log.finishes, std::vector{FinishReason::kError});
  EXPECT_EQ(log.error, "the logits of position 2 hold NaN or infinity");
}

TEST(SchedulerTest, WhatCanNeverRunIsRefused) {
  const Scheduler scheduler(TestLimits(64), TestOptions());
  const auto refusal = [&](std::vector<int32_t> prompt, auto change) {
    Log log;
    Request request = MakeRequest(std::move(prompt), 5, &log);
    change(request);
    const absl::Status status = scheduler.Check(request);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  };
  const auto sampling = [&](auto change) {
    return refusal({1}, [&](Request& request) { change(request.sampling); });
  };
  const auto nothing = [](Request&) {};
  const auto has = [](const std::string& message, const char* a, const char* b) {
    return message.find(a) != std::string::npos && message.find(b) != std::string::npos;
  };
  using S = SamplingParams;
  const double nan = std::numeric_limits<double>::quiet_NaN();
  std::mt19937 random(1);
  EXPECT_PRED3(has, refusal({}, nothing), "empty", "");
  EXPECT_PRED3(has, refusal({1, 1000}, nothing), "1000", "token 1");
  EXPECT_PRED3(has, refusal({-1}, nothing), "-1", "1000");
  EXPECT_PRED3(has, refusal(RandomPrompt(random, 100), nothing), "100", "no room");
  EXPECT_PRED3(has, sampling([](S& s) { s.temperature = -1; }), "temperature", "-1");
  EXPECT_PRED3(has, sampling([](S& s) { s.temperature = 1.0 / 0.0; }), "temperature", "inf");
  EXPECT_PRED3(has, sampling([&](S& s) { s.temperature = nan; }), "temperature", "nan");
  EXPECT_PRED3(has, sampling([](S& s) { s.top_p = 0; }), "top_p", "0");
  EXPECT_PRED3(has, sampling([](S& s) { s.top_p = 1.5; }), "top_p", "1.5");
  EXPECT_PRED3(has, sampling([](S& s) { s.top_k = -2; }), "top_k", "-2");
  EXPECT_PRED3(has, sampling([](S& s) { s.min_p = 1.5; }), "min_p", "1.5");
  EXPECT_PRED3(has, sampling([](S& s) { s.repetition_penalty = 0; }), "repetition_penalty", "0");
  EXPECT_PRED3(has, sampling([](S& s) { s.frequency_penalty = 3; }), "frequency_penalty", "3");
  EXPECT_PRED3(has, sampling([&](S& s) { s.presence_penalty = nan; }), "presence_penalty", "nan");
  EXPECT_PRED3(has, sampling([](S& s) { s.logit_bias = {{1000, 1}}; }), "logit_bias", "1000");
  EXPECT_PRED3(has, sampling([](S& s) { s.logit_bias = {{1, 101}}; }), "logit_bias", "101");
  EXPECT_PRED3(has, sampling([](S& s) { s.logit_bias = {{1, 1}, {1, 2}}; }), "id 1", "twice");
  EXPECT_PRED3(has, sampling([](S& s) { s.max_tokens = 0; }), "max_tokens", "0");
  EXPECT_PRED3(has, sampling([](S& s) { s.min_tokens = 6; }), "min_tokens", "6");
  EXPECT_PRED3(has, sampling([](S& s) { s.stop_token_ids = {1000}; }), "1000", "stop");
  EXPECT_PRED3(has, sampling([](S& s) { s.num_logprobs = -1; }), "logprobs", "-1");
  EXPECT_PRED3(has, sampling([](S& s) { s.num_prompt_logprobs = 129; }), "prompt_logprobs", "129");
  EXPECT_PRED3(has, sampling([](S& s) { s.n = 0; }), "n is 0", "");
}

TEST(SchedulerTest, LengthIsClippedToTheLimit) {
  Harness harness(TestLimits(64));
  Log log;
  std::mt19937 random(1);
  ASSERT_TRUE(harness.Submit(MakeRequest(RandomPrompt(random, 90), 1000, &log)).ok());
  harness.RunAll();
  EXPECT_EQ(log.tokens.size(), 10u);
  EXPECT_EQ(log.finishes, std::vector{FinishReason::kLength});
}

}  // namespace
}  // namespace lockstep
