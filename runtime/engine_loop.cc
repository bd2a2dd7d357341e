#include "runtime/engine_loop.h"

#include <algorithm>
#include <utility>

namespace lockstep {

absl::StatusOr<std::unique_ptr<EngineLoop>> EngineLoop::Create(
    PlanLimits limits, EngineLoopOptions options, const std::vector<Range>& vocab_ranges,
    EngineParts parts, Communicator& communicator) {
  options.scheduler.max_score_rows = MaxScoreRows(limits.vocab_size);
  limits.max_logits_rows =
      MaxLogitsRows(limits.max_num_batched_tokens, limits.max_num_seqs, limits.vocab_size);
  std::unique_ptr<EngineLoop> engine(
      new EngineLoop(limits, std::move(options), std::move(parts), communicator));
  const bool leads = communicator.rank() == 0;
  const absl::Status made = CatchExhaustion("preparing the steps", [&]() -> absl::Status {
    StepRunnerOptions run{.steps_in_flight = engine->options_.steps_in_flight,
                          .watched = &engine->watched_};
    if (const CudaSeat* const cuda = engine->parts_.cuda.get(); cuda != nullptr) {
      run.stream = cuda->stream.get();
      run.nccl = cuda->nccl.get();
    }
    LOCKSTEP_ASSIGN_OR_RETURN(
        engine->runner_,
        StepRunner::Create(limits, run, vocab_ranges, *engine->parts_.decoder, engine->parts_.pool,
                           communicator, *engine->parts_.threads));
    engine->runner_->set_checks(engine->parts_.tp_checker.get(), engine->parts_.checked_attention);
    if (!leads) return absl::OkStatus();
    engine->scheduler_ = std::make_unique<Scheduler>(limits, engine->options_.scheduler);
    if (engine->options_.step_log.empty()) return absl::OkStatus();
    LOCKSTEP_ASSIGN_OR_RETURN(engine->step_log_, StepLog::Create(engine->options_.step_log));
    return absl::OkStatus();
  });
  const absl::Status agreed = Agree(communicator, made);
  if (!agreed.ok()) {
    engine->failure_ = agreed;  // no rank follows: there is nobody to stop
    return agreed;
  }
  if (leads) {
    engine->sink_ = [engine = engine.get(), scheduler = engine->scheduler_.get()](
                        int64_t b, int64_t first_position, int64_t rows, const float* logits) {
      const ProgressPause pause(engine->watched_.progress);
      scheduler->DeliverPromptLogits(b, first_position, rows, logits);
    };
  }
  return engine;
}

EngineLoop::EngineLoop(const PlanLimits& limits, EngineLoopOptions options, EngineParts parts,
                       Communicator& communicator)
    : limits_(limits),
      options_(std::move(options)),
      watched_(options_.watched != nullptr ? *options_.watched : unwatched_),
      parts_(std::move(parts)),
      communicator_(communicator) {}

EngineLoop::~EngineLoop() {
  if (communicator_.rank() == 0) Stop().IgnoreError();
}

absl::Status EngineLoop::CheckRank(bool wants_rank_0) const {
  if ((communicator_.rank() == 0) == wants_rank_0) {
    const std::lock_guard lock(mutex_);
    return failure_;
  }
  return absl::FailedPreconditionError(
      absl::StrFormat("called on rank %d: rank 0 submits, runs and stops, the others follow",
                      communicator_.rank()));
}

absl::Status EngineLoop::CheckOpen() const {
  LOCKSTEP_RETURN_IF_ERROR(CheckRank(/*wants_rank_0=*/true));
  const std::lock_guard lock(mutex_);
  if (stopped_) return absl::FailedPreconditionError("the engine was stopped");
  return absl::OkStatus();
}

absl::StatusOr<RequestId> EngineLoop::Submit(Request request) {
  LOCKSTEP_RETURN_IF_ERROR(CheckOpen());
  LOCKSTEP_RETURN_IF_ERROR(scheduler_->Check(request));
  if (options_.emulates_rank &&
      (request.on_prompt_logits || request.sampling.num_prompt_logprobs.has_value())) {
    return absl::InvalidArgumentError("a rank that is emulated has no whole logits to score with");
  }
  const std::lock_guard lock(mutex_);
  if (stop_requested_) return absl::FailedPreconditionError("the engine is being stopped");
  inbox_.push_back({next_id_, std::move(request)});
  wake_.notify_one();
  return next_id_++;
}

void EngineLoop::Cancel(RequestId id) {
  const std::lock_guard lock(mutex_);
  inbox_.push_back({id, std::nullopt});
  wake_.notify_one();
}

void EngineLoop::RequestStop() {
  const std::lock_guard lock(mutex_);
  stop_requested_ = true;
  wake_.notify_one();
}

bool EngineLoop::ReadInbox() {
  const ProgressPause pause(watched_.progress);  // what is cancelled is told to callbacks
  bool stopping;
  {
    // Both at once: nothing is accepted behind the wish to stop, so nothing is left behind.
    const std::lock_guard lock(mutex_);
    reading_.swap(inbox_);
    stopping = stop_requested_;
  }
  for (Message& message : reading_) {
    if (message.request.has_value()) {
      scheduler_->Submit(message.id, *std::move(message.request));
    } else {
      scheduler_->Cancel(message.id);
    }
  }
  reading_.clear();
  return stopping;
}

void EngineLoop::Delivered() const {
  if (on_delivered_) on_delivered_();
}

absl::Status EngineLoop::RunUntilIdle() {
  LOCKSTEP_RETURN_IF_ERROR(CheckOpen());
  while (true) {
    ReadInbox();
    Delivered();  // of cancellations
    if (!scheduler_->idle()) {
      LOCKSTEP_RETURN_IF_ERROR(Step());
      continue;
    }
    const std::lock_guard lock(mutex_);
    stats_.scheduler = scheduler_->stats();
    if (inbox_.empty()) return absl::OkStatus();
  }
}

absl::Status EngineLoop::Run() {
  LOCKSTEP_RETURN_IF_ERROR(CheckOpen());
  while (true) {
    const bool stopping = ReadInbox();
    if (stopping) {
      const ProgressPause pause(watched_.progress);
      scheduler_->CancelAll();
    }
    Delivered();  // of cancellations
    if (!scheduler_->idle()) {
      LOCKSTEP_RETURN_IF_ERROR(Step());
    } else if (stopping) {
      return absl::OkStatus();
    } else {
      LOCKSTEP_RETURN_IF_ERROR(WaitForWork());
    }
  }
}

// Sleeps until somebody wants something, or the other ranks are to hear from us.
absl::Status EngineLoop::WaitForWork() {
  watched_.progress.SetPhase(RankPhase::kIdle);
  {
    std::unique_lock lock(mutex_);
    stats_.scheduler = scheduler_->stats();
    const auto wanted = [this] { return !inbox_.empty() || stop_requested_; };
    const std::chrono::duration<double> patience(options_.heartbeat_seconds);
    if (wake_.wait_for(lock, patience, wanted)) return absl::OkStatus();
  }
  return Fail(SendKind(StepKind::kHeartbeat));
}

absl::Status EngineLoop::SendKind(StepKind kind) {
  plan_.Clear();
  plan_.kind = kind;
  return BroadcastPlan(communicator_, plan_, buffer_);
}

absl::Status EngineLoop::Fail(absl::Status status) {
  if (!status.ok()) {
    const std::lock_guard lock(mutex_);
    failure_ = status;
  }
  return status;
}

absl::Status EngineLoop::Step() {
  bool launched = true;
  while (launched && scheduler_->num_in_flight() < options_.steps_in_flight) {
    LOCKSTEP_RETURN_IF_ERROR(Fail(LaunchStep(&launched)));
  }
  if (scheduler_->num_in_flight() > 0) return Fail(LandStep());
  Delivered();  // what could not be scheduled
  return absl::OkStatus();
}

// Plans, broadcasts and launches one step; `launched` becomes false when there is none.
absl::Status EngineLoop::LaunchStep(bool* launched) {
  const Clock::time_point start = Clock::now();
  *launched = scheduler_->Schedule(plan_);
  if (!*launched) return absl::OkStatus();
  launched_.push_back({plan_.step, start, scheduler_->planned_prompt_tokens()});
  Clock::time_point from = start;
  EndPhase(&StepPhaseSeconds::plan, &from);
  LOCKSTEP_RETURN_IF_ERROR(BroadcastPlan(communicator_, plan_, buffer_));
  EndPhase(&StepPhaseSeconds::broadcast, &from);
  LOCKSTEP_RETURN_IF_ERROR(runner_->Launch(View(plan_), sink_));
  EndPhase(&StepPhaseSeconds::launch, &from);
  return absl::OkStatus();
}

void EngineLoop::EndPhase(double StepPhaseSeconds::*phase, Clock::time_point* from) {
  const Clock::time_point now = Clock::now();
  phases_.*phase += std::chrono::duration<double>(now - *from).count();
  *from = now;
}

absl::Status EngineLoop::LandStep() {
  Clock::time_point from = Clock::now();
  LOCKSTEP_ASSIGN_OR_RETURN(const StepResult* const result, runner_->Land());
  const Launched step = launched_.front();
  launched_.erase(launched_.begin());
  EndPhase(&StepPhaseSeconds::land, &from);
  // Steps overlap: what this one took is the time since the one before it landed.
  const double seconds =
      std::chrono::duration<double>(from - std::max(step.planned_at, last_landed_)).count();
  last_landed_ = from;
  CountStep(*result, step.prompt_tokens, seconds);
  StepRecord record;
  if (step_log_ != nullptr) {
    record = {step.step, std::chrono::system_clock::now(), seconds, scheduler_->OldestRows(),
              scheduler_->stats()};
  }
  {
    const ProgressPause pause(watched_.progress);  // callbacks take the time that they want
    scheduler_->Update(*result);
    Delivered();
  }
  // Nobody waits for the log.
  if (step_log_ != nullptr) LOCKSTEP_RETURN_IF_ERROR(step_log_->Write(record));
  EndPhase(&StepPhaseSeconds::deliver, &from);
#ifndef NDEBUG
  LOCKSTEP_RETURN_IF_ERROR(scheduler_->CheckInvariants());
#endif
  return absl::OkStatus();
}

void EngineLoop::CountStep(const StepResult& result, int64_t prompt_tokens, double seconds) {
  const std::vector<int32_t>& sampled = result.sampled.tokens;
  const int64_t generated =
      std::ssize(sampled) - std::count(sampled.begin(), sampled.end(), kFailedToken);
  const std::lock_guard lock(mutex_);
  stats_.scheduler = scheduler_->stats();
  stats_.phases = phases_;
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

EngineStats EngineLoop::stats() const {
  const std::lock_guard lock(mutex_);
  return stats_;
}

void EngineLoop::set_load_seconds(double seconds) {
  const std::lock_guard lock(mutex_);
  stats_.load_seconds = seconds;
}

absl::Status EngineLoop::Stop() {
  LOCKSTEP_RETURN_IF_ERROR(CheckRank(/*wants_rank_0=*/true));
  {
    const std::lock_guard lock(mutex_);
    if (stopped_) return absl::OkStatus();
    stopped_ = true;
  }
  LOCKSTEP_RETURN_IF_ERROR(Fail(SendKind(StepKind::kStop)));
  return Fail(runner_->LogChecks());
}

absl::Status EngineLoop::Follow() {
  LOCKSTEP_RETURN_IF_ERROR(CheckRank(/*wants_rank_0=*/false));
  while (true) {
    auto plan = ReceivePlan(communicator_, limits_, buffer_);
    LOCKSTEP_RETURN_IF_ERROR(Fail(plan.status()));
    const bool runs = plan->kind == StepKind::kRun;
    if (runs) LOCKSTEP_RETURN_IF_ERROR(Fail(runner_->Launch(*plan, sink_)));
    if (plan->kind == StepKind::kHeartbeat) watched_.progress.SetPhase(RankPhase::kIdle);
    // As rank 0 does. It has landed all of them when it is idle or stops: an error of the last step
    // must not wait for the next one.
    while (runner_->num_in_flight() >= (runs ? options_.steps_in_flight : 1)) {
      LOCKSTEP_RETURN_IF_ERROR(Fail(runner_->Land().status()));
      const std::lock_guard lock(mutex_);
      ++stats_.steps;
    }
    if (plan->kind == StepKind::kStop) return Fail(runner_->LogChecks());
  }
}

}  // namespace lockstep
