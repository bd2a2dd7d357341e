#include "runtime/scheduler.h"

#include <gtest/gtest.h>

#include <deque>
#include <limits>
#include <numeric>
#include <random>
#include <set>
#include <string>

#include "runtime/batch_state.h"
#include "runtime/sampler.h"

namespace lockstep {
namespace {

constexpr int32_t kPoison = -7;
constexpr int64_t kScoreRows = 5;

PlanLimits TestLimits(int64_t max_num_batched_tokens, int64_t num_blocks = 64) {
  return {.max_num_batched_tokens = max_num_batched_tokens,
          .max_num_seqs = 4,
          .max_model_len = 100,
          .block_size = 4,
          .num_blocks = num_blocks,
          .vocab_size = 1000,
          .max_logits_rows = 20};
}

SchedulerOptions TestOptions() {
  SchedulerOptions options;
  options.max_score_rows = kScoreRows;
  options.poison_freed_blocks = true;
  return options;
}

// What a choice received.
struct Log {
  std::vector<int32_t> tokens;
  std::vector<FinishReason> finishes;
  std::string error;
  std::optional<int32_t> stop_token;
  std::vector<int64_t> scored;           // positions
  std::vector<int32_t> prompt_logprobs;  // tokens, from position 1 on
};

Request MakeRequest(std::vector<int32_t> prompt, int64_t max_tokens, Log* log) {
  Request request;
  request.prompt = std::move(prompt);
  request.sampling.temperature = 0;
  request.sampling.max_tokens = max_tokens;
  request.on_event = [log](const RequestEvent& event) {
    Log& own = log[event.choice];
    EXPECT_TRUE(own.finishes.empty()) << "an event after the last";
    if (event.token) own.tokens.push_back(*event.token);
    if (event.finish != FinishReason::kNone) own.finishes.push_back(event.finish);
    own.stop_token = event.stop_token;
    own.error = event.error;
    return true;
  };
  return request;
}

// The token a fake model gives after a sequence: a function of the whole sequence and the seed, so
// that a token computed twice, left out or attributed to another choice shows.
int32_t NextToken(const std::vector<int32_t>& sequence, uint64_t seed = 0) {
  uint64_t h = 17 + seed;
  for (const int32_t t : sequence) h = h * 1000003 + static_cast<uint64_t>(t);
  return static_cast<int32_t>(h % 997);
}

std::vector<int32_t> Generate(std::vector<int32_t> sequence, int64_t count, uint64_t seed = 0) {
  std::vector<int32_t> tokens;
  for (int64_t i = 0; i < count; ++i) {
    tokens.push_back(NextToken(sequence, seed));
    sequence.push_back(tokens.back());
  }
  return tokens;
}

// Runs a scheduler against a fake model that keeps the "KV cache" per physical slot, and checks
// every plan: budget, distinct slots, and that the decoder and the batch state accept it. With
// steps_in_flight = 2 the scheduler learns of a step's tokens one step late.
class Harness {
 public:
  explicit Harness(const PlanLimits& limits, SchedulerOptions options = TestOptions(),
                   int steps_in_flight = 1)
      : limits_(limits),
        steps_in_flight_(steps_in_flight),
        scheduler_(limits, std::move(options)),
        state_(limits, {0, limits.vocab_size}),
        cache_(static_cast<size_t>(limits.num_blocks * limits.block_size), kPoison) {}

  Scheduler& scheduler() { return scheduler_; }
  const StepPlan& plan() const { return plan_; }

  absl::StatusOr<RequestId> Submit(Request request) {
    LOCKSTEP_RETURN_IF_ERROR(scheduler_.Check(request));
    scheduler_.Submit(++last_id_, std::move(request));
    return last_id_;
  }

  bool Step() {
    while (scheduler_.num_in_flight() < steps_in_flight_ && scheduler_.Schedule(plan_)) {
      if (!Execute()) return false;
    }
    if (results_.empty()) return false;
    const StepResult result = std::move(results_.front());
    results_.pop_front();
    scheduler_.Update(result);
    const absl::Status invariants = scheduler_.CheckInvariants();
    EXPECT_TRUE(invariants.ok()) << invariants;
    return invariants.ok();
  }
  void RunAll() {
    for (int step = 0; Step(); ++step) ASSERT_LT(step, 10000);
    EXPECT_TRUE(scheduler_.idle());
    EXPECT_EQ(scheduler_.stats().num_free_blocks, limits_.num_blocks);
  }

  int64_t computed_tokens = 0;
  bool fail_next = false;

 private:
  // What every rank does with a plan.
  bool Execute() {
    PlanBuffer buffer;
    const int64_t bytes = EncodePlan(plan_, buffer);
    const auto view = DecodePlan({buffer.data(), static_cast<size_t>(bytes)}, limits_);
    EXPECT_TRUE(view.ok()) << view.status();
    if (!view.ok()) return false;
    const absl::Status applied = state_.Apply(*view);
    EXPECT_TRUE(applied.ok()) << applied;
    if (!applied.ok()) return false;
    EXPECT_LE(plan_.num_tokens(), limits_.max_num_batched_tokens);
    WriteCache();
    Sample();
    computed_tokens += plan_.num_tokens();
    return true;
  }

  void WriteCache() {
    const auto block = [&](int32_t id) { return cache_.begin() + id * limits_.block_size; };
    for (const int32_t id : plan_.poisoned_blocks) {
      std::fill_n(block(id), limits_.block_size, kPoison);
    }
    for (const PlanBlockCopy& copy : plan_.block_copies) {
      std::copy_n(block(copy.source), limits_.block_size, block(copy.target));
    }
    const std::set<int64_t> slots(plan_.slot_mapping.begin(), plan_.slot_mapping.end());
    EXPECT_EQ(slots.size(), plan_.slot_mapping.size()) << "two tokens write one slot";
    for (size_t t = 0; t < plan_.slot_mapping.size(); ++t) {
      cache_[static_cast<size_t>(plan_.slot_mapping[t])] = state_.forward_batch().token_ids[t];
    }
  }

  void Sample() {
    StepResult& result = results_.emplace_back();
    const std::vector<float> logits(static_cast<size_t>(limits_.vocab_size * kScoreRows), 1.0f);
    for (int64_t b = 0; b < plan_.num_requests(); ++b) {
      const int64_t count = plan_.query_start_loc[b + 1] - plan_.query_start_loc[b];
      if (Samples(plan_.outputs[b])) {
        const uint64_t seed = state_.sample_rows()[result.sampled.tokens.size()].seed;
        result.sampled.tokens.push_back(fail_next ? kFailedToken
                                                  : NextToken(ReadSequence(b), seed));
      } else if (plan_.outputs[b] == StepOutput::kScore) {
        scheduler_.DeliverPromptLogits(b, plan_.seq_lens[b] - count, count, logits.data());
      }
    }
    for (const LogprobRow& row : state_.logprob_rows()) {
      result.prompt_logprobs.push_back({.token = {row.token, -1.0f}, .top = {}});
    }
    state_.Accept(result.sampled.tokens);
  }

  // The sequence of the plan's request b, read from the cache through the block table.
  std::vector<int32_t> ReadSequence(int64_t b) const {
    const AttentionBatch& batch = state_.forward_batch().attention;
    std::vector<int32_t> sequence;
    for (int64_t p = 0; p < plan_.seq_lens[b]; ++p) {
      const int64_t block = batch.BlockTable(b)[p / limits_.block_size];
      sequence.push_back(
          cache_[static_cast<size_t>(block * limits_.block_size + p % limits_.block_size)]);
      EXPECT_NE(sequence.back(), kPoison) << "position " << p << " was never computed";
    }
    return sequence;
  }

  const PlanLimits limits_;
  const int steps_in_flight_;
  Scheduler scheduler_;
  BatchState state_;
  StepPlan plan_;
  std::deque<StepResult> results_;
  std::vector<int32_t> cache_;
  RequestId last_id_ = 0;
};

std::vector<int32_t> RandomPrompt(std::mt19937& random, int64_t length) {
  std::vector<int32_t> prompt(static_cast<size_t>(length));
  for (int32_t& t : prompt) t = static_cast<int32_t>(random() % 1000);
  return prompt;
}

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
