// The engine once its parts stand: the loop of rank 0 and that of the others. Engine::Create makes
// the parts; tests bring their own decoder.
#pragma once

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "cache/kv_pool.h"
#include "model/attention_selection.h"
#include "model/decoder.h"
#include "parallel/rank_links.h"
#include "runtime/core/thread_pool.h"
#include "runtime/engine.h"
#include "runtime/engine_device.h"
#include "runtime/scheduler.h"
#include "runtime/step_log.h"
#include "runtime/step_plan.h"
#include "runtime/step_runner.h"

namespace lockstep {

// Owned by one rank's engine; later members may refer to earlier ones.
struct EngineParts {
  std::unique_ptr<CudaSeat> cuda;  // null on the CPU
  std::unique_ptr<ThreadPool> threads;
  std::unique_ptr<AttentionBackend> attention;  // may be null when the decoder needs none
  std::unique_ptr<Decoder> decoder;
  KvPool pool;

  // When asked for; on all ranks alike.
  std::unique_ptr<TpChecker> tp_checker;
  const CheckedBackend* checked_attention = nullptr;  // `attention`, when it is one
};

// Of EngineOptions and the model, what the loop needs.
struct EngineLoopOptions {
  SchedulerOptions scheduler;  // max_score_rows is set by the loop
  int steps_in_flight = 1;
  double heartbeat_seconds = 1;
  std::string step_log;
  bool emulates_rank = false;      // there are no other ranks that hold the rest of the vocabulary
  WatchedRank* watched = nullptr;  // as in EngineOptions
};

class EngineLoop : public Engine {
 public:
  // COLLECTIVE; the same limits (but max_logits_rows, which is set here), options and vocab_ranges
  // on all ranks. On failure all ranks get the same status.
  static absl::StatusOr<std::unique_ptr<EngineLoop>> Create(PlanLimits limits,
                                                            EngineLoopOptions options,
                                                            const std::vector<Range>& vocab_ranges,
                                                            EngineParts parts,
                                                            Communicator& communicator);
  // Rank 0 stops the others if that was not done.
  ~EngineLoop() override;

  int64_t max_model_len() const override { return limits_.max_model_len; }
  absl::StatusOr<RequestId> Submit(Request request) override;
  void Cancel(RequestId id) override;
  void OnDelivered(std::function<void()> callback) override { on_delivered_ = std::move(callback); }
  absl::Status RunUntilIdle() override;
  absl::Status Run() override;
  void RequestStop() override;
  absl::Status Stop() override;
  absl::Status Follow() override;
  EngineStats stats() const override;
  void set_load_seconds(double seconds);

  // Rank 0; not while the engine runs.
  const Scheduler& scheduler() const { return *scheduler_; }

 private:
  using Clock = std::chrono::steady_clock;

  // What other threads ask for, in order: a new request, or the end of one.
  struct Message {
    RequestId id = 0;
    std::optional<Request> request;  // none: cancel
  };

  EngineLoop(const PlanLimits& limits, EngineLoopOptions options, EngineParts parts,
             Communicator& communicator);

  absl::Status CheckRank(bool wants_rank_0) const;
  absl::Status CheckOpen() const;
  // Takes what other threads have asked for; true when they want the engine to stop.
  bool ReadInbox();
  // Rank 0. Keeps steps_in_flight steps launched, and lands the oldest.
  absl::Status Step();
  void Delivered() const;
  absl::Status LaunchStep(bool* launched);
  absl::Status LandStep();
  absl::Status WaitForWork();
  absl::Status SendKind(StepKind kind);
  absl::Status Fail(absl::Status status);
  // Adds the time since `*from` to a phase, and moves `*from` to now.
  void EndPhase(double StepPhaseSeconds::*phase, Clock::time_point* from);
  void CountStep(const StepResult& result, int64_t prompt_tokens, double seconds);

  const PlanLimits limits_;
  const EngineLoopOptions options_;
  WatchedRank unwatched_;
  WatchedRank& watched_;  // of the options, else unwatched_
  EngineParts parts_;
  Communicator& communicator_;
  std::unique_ptr<StepRunner> runner_;
  std::unique_ptr<Scheduler> scheduler_;  // rank 0
  std::unique_ptr<StepLog> step_log_;     // rank 0, when asked for
  PromptLogitsSink sink_;                 // rank 0
  std::function<void()> on_delivered_;    // rank 0; may be empty
  StepPlan plan_;                         // rank 0
  PlanBuffer buffer_;
  // Rank 0: a launched step.
  struct Launched {
    uint64_t step = 0;
    Clock::time_point planned_at;
    int64_t prompt_tokens = 0;
  };
  std::vector<Launched> launched_;  // oldest first
  Clock::time_point last_landed_;
  StepPhaseSeconds phases_;  // the engine's thread; goes into stats_ when a step has landed

  // Between the engine's thread and the others.
  mutable std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<Message> inbox_;
  std::vector<Message> reading_;  // the engine's thread
  RequestId next_id_ = 1;
  bool stop_requested_ = false;
  bool stopped_ = false;
  // The first error of a step or a broadcast. Other ranks may be inside a collective then, so
  // nothing is sent after it: the job has to be aborted.
  absl::Status failure_;
  EngineStats stats_;
};

}  // namespace lockstep
