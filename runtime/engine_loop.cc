#include "runtime/engine_loop.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace lockstep {

absl::StatusOr<std::unique_ptr<EngineLoop>> EngineLoop::Create(
    PlanLimits limits, const std::vector<Range>& vocab_ranges, EngineParts parts,
    Communicator& communicator) {
  const int64_t max_score_rows = MaxScoreRows(limits.vocab_size);
  limits.max_logits_rows =
      std::min(limits.max_num_batched_tokens, limits.max_num_seqs + max_score_rows);
  std::unique_ptr<EngineLoop> engine(new EngineLoop(limits, std::move(parts), communicator));
  absl::StatusOr<std::unique_ptr<StepRunner>> runner = nullptr;
  const absl::Status made = CatchExhaustion("preparing the steps", [&] {
    runner = StepRunner::Create(limits, vocab_ranges, *engine->parts_.decoder, engine->parts_.pool,
                                communicator, *engine->parts_.threads);
    return runner.status();
  });
  const absl::Status agreed = Agree(communicator, made);
  if (!agreed.ok()) {
    engine->failure_ = agreed;  // no rank follows: there is nobody to stop
    return agreed;
  }
  engine->runner_ = *std::move(runner);
  if (communicator.rank() == 0) {
    engine->scheduler_ = std::make_unique<Scheduler>(limits, max_score_rows);
    engine->sink_ = [scheduler = engine->scheduler_.get()](int64_t b, int64_t first_position,
                                                           int64_t rows, const float* logits) {
      scheduler->DeliverPromptLogits(b, first_position, rows, logits);
    };
  }
  return engine;
}

EngineLoop::EngineLoop(const PlanLimits& limits, EngineParts parts, Communicator& communicator)
    : limits_(limits), parts_(std::move(parts)), communicator_(communicator) {}

EngineLoop::~EngineLoop() {
  if (communicator_.rank() == 0) Stop().IgnoreError();
}

absl::Status EngineLoop::CheckRank(bool wants_rank_0) const {
  if ((communicator_.rank() == 0) == wants_rank_0) return failure_;
  return absl::FailedPreconditionError(
      absl::StrFormat("called on rank %d: rank 0 submits, runs and stops, the others follow",
                      communicator_.rank()));
}

absl::StatusOr<RequestId> EngineLoop::Submit(Request request) {
  LOCKSTEP_RETURN_IF_ERROR(CheckRank(/*wants_rank_0=*/true));
  if (stopped_) return absl::FailedPreconditionError("the engine was stopped");
  return scheduler_->Submit(std::move(request));
}

absl::Status EngineLoop::RunUntilIdle() {
  LOCKSTEP_RETURN_IF_ERROR(CheckRank(/*wants_rank_0=*/true));
  if (stopped_) return absl::FailedPreconditionError("the engine was stopped");
  while (!scheduler_->idle()) {
    failure_ = Step();
    LOCKSTEP_RETURN_IF_ERROR(failure_);
  }
  return absl::OkStatus();
}

absl::Status EngineLoop::Step() {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point start = Clock::now();
  LOCKSTEP_CHECK(scheduler_->Schedule(plan_));
  LOCKSTEP_RETURN_IF_ERROR(BroadcastPlan(communicator_, plan_, buffer_));
  LOCKSTEP_RETURN_IF_ERROR(runner_->Execute(View(plan_), sink_));
  CountStep(std::chrono::duration<double>(Clock::now() - start).count());
  scheduler_->Update(runner_->sampled());
  return absl::OkStatus();
}

void EngineLoop::CountStep(double seconds) {
  const int64_t prompt_tokens = scheduler_->planned_prompt_tokens();
  const auto sampled = runner_->sampled();
  const int64_t generated = static_cast<int64_t>(sampled.size()) -
                            std::count(sampled.begin(), sampled.end(), kFailedToken);
  ++stats_.steps;
  stats_.prompt_tokens += prompt_tokens;
  stats_.generated_tokens += generated;
  if (prompt_tokens > 0) {
    stats_.prefill_seconds += seconds;
  } else {
    stats_.decode_seconds += seconds;
    stats_.decode_tokens += generated;
  }
}

absl::Status EngineLoop::Stop() {
  LOCKSTEP_RETURN_IF_ERROR(CheckRank(/*wants_rank_0=*/true));
  if (stopped_) return absl::OkStatus();
  stopped_ = true;
  plan_.Clear();
  plan_.kind = StepKind::kStop;
  failure_ = BroadcastPlan(communicator_, plan_, buffer_);
  return failure_;
}

absl::Status EngineLoop::Follow() {
  LOCKSTEP_RETURN_IF_ERROR(CheckRank(/*wants_rank_0=*/false));
  while (true) {
    auto plan = ReceivePlan(communicator_, limits_, buffer_);
    failure_ = plan.status();
    LOCKSTEP_RETURN_IF_ERROR(failure_);
    if (plan->kind == StepKind::kStop) return absl::OkStatus();
    if (plan->kind == StepKind::kHeartbeat) continue;
    failure_ = runner_->Execute(*plan, sink_);
    LOCKSTEP_RETURN_IF_ERROR(failure_);
    ++stats_.steps;
  }
}

}  // namespace lockstep
