// Executes plans on one rank: the same code on all ranks, rank 0 included.
//
// A step is launched, and landed later: up to steps_in_flight steps are launched before the oldest
// of them lands. On a device, Launch issues the step and its sampling to the rank's stream and goes
// on; Land waits for the stream to come so far. On the CPU, Launch does all the work.
//
// Some steps on a device need the host before they are done, and Launch waits for them: those of
// scored prompts and prompt logprobs, whose logits the host reads, and those with more than
// CudaSampler has memory for, which the host's Sampler samples. Rows with penalties need
// the tokens of the steps before them: Launch issues their forward pass, waits for the steps
// before, and issues the sampling while the forward pass runs.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "cache/kv_pool.h"
#include "model/attention_selection.h"
#include "model/decoder.h"
#include "parallel/communicator.h"
#include "parallel/rank_links.h"
#include "runtime/batch_state.h"
#include "runtime/core/buffer.h"
#include "runtime/core/cuda_device.h"
#include "runtime/core/thread_pool.h"
#include "runtime/cuda_sampler.h"
#include "runtime/sampler.h"
#include "runtime/step_plan.h"
#include "runtime/tp_check.h"

namespace lockstep {

// Rows of full logits a step makes at most for scored prompts: 64 MB of float32, at least one.
int64_t MaxScoreRows(int64_t vocab_size);
// Rows of logits a step makes at most.
int64_t MaxLogitsRows(int64_t max_num_batched_tokens, int64_t max_num_seqs, int64_t vocab_size);

// Receives full logits on rank 0: rows [first_position, first_position + rows) of the plan's
// request b, float32 [rows, V].
using PromptLogitsSink =
    std::function<void(int64_t b, int64_t first_position, int64_t rows, const float* logits)>;

// What a step gave, the same on all ranks.
struct StepResult {
  SampleOutput sampled;  // of the requests that sample, in the plan's order
  std::vector<PositionLogprobs> prompt_logprobs;  // of the rows with a logprob target, in order
};

struct StepRunnerOptions {
  int steps_in_flight = 1;
  // With a DeviceDecoder, its stream and, where there are several ranks, NCCL.
  CudaStream stream = nullptr;
  NcclCommunicator* nccl = nullptr;
  WatchedRank* watched = nullptr;  // is told of steps, and ends waits for the device; never null
};

class StepRunner {
 public:
  // The references must outlive the runner. ResourceExhausted when the logits buffer
  // (float32 [limits.max_logits_rows, V_local]) or what sampling needs cannot be had.
  static absl::StatusOr<std::unique_ptr<StepRunner>> Create(const PlanLimits& limits,
                                                            const StepRunnerOptions& options,
                                                            const std::vector<Range>& vocab_ranges,
                                                            Decoder& decoder, KvPool& pool,
                                                            Communicator& communicator,
                                                            ThreadPool& threads);

  // COLLECTIVE, with the same decoded kRun plan on all ranks: applies the plan, and runs or issues
  // the forward pass, the sampling and the gathering of scored prompts' logits. The plan is not
  // read afterwards. Fewer than steps_in_flight steps may wait for their Land. An error leaves the
  // job unusable; Internal, naming rank and step, when the ranks' digests differ, here or in Land.
  // `sink` is called on rank 0 alone.
  absl::Status Launch(const StepPlanView& plan, const PromptLogitsSink& sink);

  // Waits for the oldest step that has not landed. No collective: ranks may land at different
  // times. The result holds until the next Launch.
  absl::StatusOr<const StepResult*> Land();
  int64_t num_in_flight() const { return static_cast<int64_t>(num_launched_ - num_landed_); }

  // Before the first step, on all ranks alike: what Launch has checked after each forward pass;
  // null: nothing. A difference is an Internal error of Launch, the same on all ranks.
  void set_checks(TpChecker* tp, const CheckedBackend* attention) {
    tp_checker_ = tp;
    checked_attention_ = attention;
  }
  // COLLECTIVE, after the last step: rank 0 logs what the checks found.
  absl::Status LogChecks();

 private:
  // A launched step.
  struct Step {
    uint64_t number = 0;
    StepResult result;
  };

  StepRunner(const PlanLimits& limits, const StepRunnerOptions& options,
             const std::vector<Range>& vocab_ranges, Decoder& decoder, KvPool& pool,
             Communicator& communicator, ThreadPool& threads);

  absl::Status ChangePool(const StepPlanView& plan);
  absl::Status RunChecks();
  absl::Status LaunchOnHost(const StepPlanView& plan, const PromptLogitsSink& sink, Step& step);
  absl::Status LaunchOnDevice(const StepPlanView& plan, const PromptLogitsSink& sink, Step& step);
  absl::Status SampleOnDevice(const MatrixView& logits);
  absl::Status SampleOnHost(const MatrixView& logits, Step& step);
  absl::Status ReadLogits(const StepPlanView& plan, const PromptLogitsSink& sink,
                          const MatrixView& logits, Step& step);
  absl::Status SettleUpTo(uint64_t num_steps);
  absl::Status Accept(const Step& step);
  Step& StepAt(uint64_t index) { return steps_[index % steps_.size()]; }
  absl::Status CompareDigests(uint64_t step, std::span<const uint64_t> digests) const;
  absl::Status GatherScores(const StepPlanView& plan, const PromptLogitsSink& sink);
  absl::Status GatherPiece(int64_t first_logits_row, int64_t rows);

  const PlanLimits limits_;
  const std::vector<Range> vocab_ranges_;
  Decoder& decoder_;
  KvPool& pool_;
  Communicator& communicator_;
  DeviceDecoder* const device_;  // null: the decoder works on the host
  const CudaStream stream_;
  WatchedRank& watched_;
  BatchState state_;
  std::vector<Step> steps_;  // [steps_in_flight]
  uint64_t num_launched_ = 0;
  uint64_t num_settled_ = 0;  // whose result is there
  uint64_t num_landed_ = 0;
  Sampler sampler_;
  std::unique_ptr<CudaSampler> device_sampler_;  // with device_
  LogprobComputer logprobs_;
  TpChecker* tp_checker_ = nullptr;
  const CheckedBackend* checked_attention_ = nullptr;
  Buffer logits_storage_;
  PinnedBuffer pinned_logits_storage_;  // in its place where logits come from a device
  MatrixView logits_;                   // float32 [max_logits_rows, V_local]

  // Of scored prompts, on first use: one piece in rank order as received, and in rows.
  std::vector<int64_t> bytes_per_rank_;
  std::vector<float> received_;
  std::vector<float> rows_;
};

}  // namespace lockstep
