// What a step costs beside the model: scheduling, the plan and its broadcast, its application on
// every rank, digests, and the tokens' way back. Threads stand in for ranks; there is no model.
//
//   engine_bench [Google Benchmark's options, for instance --benchmark_repetitions=9]
//
// Times are of one step on rank 0, which cannot run ahead of the others by more than a plan.
#include <benchmark/benchmark.h>

#include <chrono>
#include <cstring>

#include "parallel/local_communicator.h"
#include "runtime/batch_state.h"
#include "runtime/scheduler.h"
#include "runtime/step_plan.h"

namespace lockstep {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kVocabSize = 151936;

PlanLimits Limits(int64_t max_num_batched_tokens, int64_t max_model_len, int64_t num_blocks) {
  return {.max_num_batched_tokens = max_num_batched_tokens,
          .max_num_seqs = 256,
          .max_model_len = max_model_len,
          .block_size = 16,
          .num_blocks = num_blocks,
          .vocab_size = kVocabSize,
          .max_logits_rows = 256 + 32};
}

// Rank 0: a scheduler whose model gives tokens at once.
class Leader {
 public:
  Leader(const PlanLimits& limits, Communicator& communicator)
      : communicator_(communicator),
        scheduler_(limits, {.max_score_rows = 32, .end_token_ids = {2}}),
        state_(limits, {0, kVocabSize}) {}

  void Submit(std::vector<int32_t> prompt, int64_t max_tokens) {
    Request request;
    request.prompt = std::move(prompt);
    request.sampling.max_tokens = max_tokens;
    request.on_event = [this](const RequestEvent&) {
      ++num_events_;
      return true;
    };
    scheduler_.Submit(++last_id_, std::move(request));
  }

  // Seconds; 0 when there is nothing to do.
  double Step() {
    const Clock::time_point start = Clock::now();
    if (!scheduler_.Schedule(plan_)) return 0;
    LOCKSTEP_CHECK(BroadcastPlan(communicator_, plan_, buffer_).ok());
    LOCKSTEP_CHECK(state_.Apply(View(plan_)).ok());
    result_.sampled.tokens.assign(state_.sample_rows().size(), 7);
    state_.Accept(result_.sampled.tokens);
    scheduler_.Update(result_);
    return std::chrono::duration<double>(Clock::now() - start).count();
  }
  void Stop() {
    plan_.Clear();
    plan_.kind = StepKind::kStop;
    LOCKSTEP_CHECK(BroadcastPlan(communicator_, plan_, buffer_).ok());
  }
  const Scheduler& scheduler() const { return scheduler_; }
  int64_t plan_bytes() const { return EncodedBytes(plan_); }

 private:
  Communicator& communicator_;
  Scheduler scheduler_;
  BatchState state_;
  StepPlan plan_;
  PlanBuffer buffer_;
  StepResult result_;
  RequestId last_id_ = 0;
  int64_t num_events_ = 0;
};

void Follow(const PlanLimits& limits, Communicator& communicator) {
  BatchState state(limits, {0, kVocabSize});
  PlanBuffer buffer;
  std::vector<int32_t> tokens;
  while (true) {
    const auto plan = ReceivePlan(communicator, limits, buffer);
    LOCKSTEP_CHECK(plan.ok());
    if (plan->kind == StepKind::kStop) return;
    LOCKSTEP_CHECK(state.Apply(*plan).ok());
    tokens.assign(state.sample_rows().size(), 7);
    state.Accept(tokens);
  }
}

template <typename Lead>
void OnRanks(benchmark::State& state, const PlanLimits& limits, Lead lead) {
  const auto statuses =
      RunLocalRanks(static_cast<int>(state.range(0)), [&](Communicator& communicator) {
        if (communicator.rank() == 0) {
          Leader leader(limits, communicator);
          lead(leader);
          leader.Stop();
        } else {
          Follow(limits, communicator);
        }
        return absl::OkStatus();
      });
  for (const absl::Status& status : statuses) LOCKSTEP_CHECK(status.ok());
}

std::vector<int32_t> Prompt(int64_t length, int32_t first) {
  std::vector<int32_t> prompt(static_cast<size_t>(length));
  for (int64_t i = 0; i < length; ++i) {
    prompt[i] = static_cast<int32_t>((first * 131 + i * 17) % kVocabSize);
  }
  return prompt;
}

// 256 requests decode; range(1) tokens of each lie behind them.
void DecodeStep(benchmark::State& state) {
  const int64_t history = state.range(1);
  const PlanLimits limits = Limits(8192, 65536, 256 * 4096);
  OnRanks(state, limits, [&](Leader& leader) {
    const auto refill = [&] {
      for (int32_t i = 0; i < 256; ++i) leader.Submit(Prompt(history, i), 60000 - history);
      while (leader.scheduler().stats().num_waiting > 0) leader.Step();
      for (int i = 0; i < 300; ++i) leader.Step();  // the last prompts, and some decoding
    };
    refill();
    for (auto _ : state) state.SetIterationTime(leader.Step());
    state.counters["plan_bytes"] = static_cast<double>(leader.plan_bytes());
    LOCKSTEP_CHECK(leader.scheduler().stats().num_running == 256);
  });
}
BENCHMARK(DecodeStep)
    ->ArgNames({"ranks", "history"})
    ->ArgsProduct({{1, 2}, {16, 4096, 32768}})
    ->Iterations(2000)
    ->UseManualTime()
    ->Unit(benchmark::kMicrosecond);

// One prompt in chunks of 8192 tokens.
void PrefillChunk(benchmark::State& state) {
  const PlanLimits limits = Limits(8192, 131072, 3 * 8192);
  OnRanks(state, limits, [&](Leader& leader) {
    int32_t first = 0;
    for (auto _ : state) {
      if (leader.scheduler().idle()) leader.Submit(Prompt(131072 - 16, first++), 1);
      state.SetIterationTime(leader.Step());
    }
    while (!leader.scheduler().idle()) leader.Step();
  });
}
BENCHMARK(PrefillChunk)
    ->ArgName("ranks")
    ->Arg(1)
    ->Arg(2)
    ->Iterations(160)
    ->UseManualTime()
    ->Unit(benchmark::kMicrosecond);

// A prompt of 131056 tokens of which all but the last block are in the prefix cache.
void PrefixHit(benchmark::State& state) {
  const PlanLimits limits = Limits(8192, 131072, 3 * 8192);
  OnRanks(state, limits, [&](Leader& leader) {
    const std::vector<int32_t> prompt = Prompt(131072 - 16, 1);
    leader.Submit(prompt, 1);
    while (!leader.scheduler().idle()) leader.Step();
    for (auto _ : state) {
      leader.Submit(prompt, 1);
      state.SetIterationTime(leader.Step());
      LOCKSTEP_CHECK(leader.scheduler().idle());
    }
    state.counters["hit_tokens"] =
        static_cast<double>(leader.scheduler().stats().prefix_cache_hit_tokens) /
        static_cast<double>(state.iterations());
  });
}
BENCHMARK(PrefixHit)->ArgName("ranks")->Arg(1)->Arg(2)->Iterations(100)->UseManualTime()->Unit(
    benchmark::kMicrosecond);

}  // namespace
}  // namespace lockstep

BENCHMARK_MAIN();
