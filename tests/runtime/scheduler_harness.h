// A scheduler against a fake model whose tokens depend on the whole sequence.
#pragma once

#include <gtest/gtest.h>

#include <deque>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "runtime/batch_state.h"
#include "runtime/sampler.h"
#include "runtime/scheduler.h"

namespace lockstep {

inline constexpr int32_t kPoison = -7;
inline constexpr int64_t kScoreRows = 5;

inline PlanLimits TestLimits(int64_t max_num_batched_tokens, int64_t num_blocks = 64) {
  return {.max_num_batched_tokens = max_num_batched_tokens,
          .max_num_seqs = 4,
          .max_model_len = 100,
          .block_size = 4,
          .num_blocks = num_blocks,
          .vocab_size = 1000,
          .max_logits_rows = 20};
}

inline SchedulerOptions TestOptions() {
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

inline Request MakeRequest(std::vector<int32_t> prompt, int64_t max_tokens, Log* log) {
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
inline int32_t NextToken(const std::vector<int32_t>& sequence, uint64_t seed = 0) {
  uint64_t h = 17 + seed;
  for (const int32_t t : sequence) h = h * 1000003 + static_cast<uint64_t>(t);
  return static_cast<int32_t>(h % 997);
}

inline std::vector<int32_t> Generate(std::vector<int32_t> sequence, int64_t count,
                                     uint64_t seed = 0) {
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

inline std::vector<int32_t> RandomPrompt(std::mt19937& random, int64_t length) {
  std::vector<int32_t> prompt(static_cast<size_t>(length));
  for (int32_t& t : prompt) t = static_cast<int32_t>(random() % 1000);
  return prompt;
}

}  // namespace lockstep
