// The engine once its parts stand: the loop of rank 0 and that of the others. Engine::Create makes
// the parts; tests bring their own decoder.
#pragma once

#include <memory>
#include <vector>

#include "cache/kv_pool.h"
#include "model/decoder.h"
#include "runtime/core/thread_pool.h"
#include "runtime/engine.h"
#include "runtime/scheduler.h"
#include "runtime/step_plan.h"
#include "runtime/step_runner.h"

namespace lockstep {

// Owned by one rank's engine; later members may refer to earlier ones.
struct EngineParts {
  std::unique_ptr<ThreadPool> threads;
  std::unique_ptr<AttentionBackend> attention;  // may be null when the decoder needs none
  std::unique_ptr<Decoder> decoder;
  KvPool pool;
};

class EngineLoop : public Engine {
 public:
  // COLLECTIVE; the same limits (but max_logits_rows, which is set here) and vocab_ranges on all
  // ranks. On failure all ranks get the same status.
  static absl::StatusOr<std::unique_ptr<EngineLoop>> Create(PlanLimits limits,
                                                            const std::vector<Range>& vocab_ranges,
                                                            EngineParts parts,
                                                            Communicator& communicator);
  // Rank 0 stops the others if that was not done.
  ~EngineLoop() override;

  int64_t max_model_len() const override { return limits_.max_model_len; }
  absl::StatusOr<RequestId> Submit(Request request) override;
  absl::Status RunUntilIdle() override;
  absl::Status Stop() override;
  absl::Status Follow() override;
  const EngineStats& stats() const override { return stats_; }
  void set_load_seconds(double seconds) { stats_.load_seconds = seconds; }

 private:
  EngineLoop(const PlanLimits& limits, EngineParts parts, Communicator& communicator);

  // Rank 0. Plans, broadcasts and executes one step.
  absl::Status Step();
  absl::Status CheckRank(bool wants_rank_0) const;
  void CountStep(double seconds);

  const PlanLimits limits_;
  EngineParts parts_;
  Communicator& communicator_;
  std::unique_ptr<StepRunner> runner_;
  std::unique_ptr<Scheduler> scheduler_;  // rank 0
  PromptLogitsSink sink_;                 // rank 0
  StepPlan plan_;                         // rank 0
  PlanBuffer buffer_;
  // The first error of a step or a broadcast. Other ranks may be inside a collective then, so
  // nothing is sent after it: the job has to be aborted.
  absl::Status failure_;
  bool stopped_ = false;
  EngineStats stats_;
};

}  // namespace lockstep
