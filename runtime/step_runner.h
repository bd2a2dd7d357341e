// Executes plans on one rank: the same code on all ranks, rank 0 included.
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
#include "runtime/batch_state.h"
#include "runtime/core/buffer.h"
#include "runtime/core/cuda_device.h"
#include "runtime/core/thread_pool.h"
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

class StepRunner {
 public:
  // The references must outlive the runner. ResourceExhausted when the logits buffer
  // (float32 [limits.max_logits_rows, V_local]) cannot be had.
  static absl::StatusOr<std::unique_ptr<StepRunner>> Create(const PlanLimits& limits,
                                                            const std::vector<Range>& vocab_ranges,
                                                            Decoder& decoder, KvPool& pool,
                                                            Communicator& communicator,
                                                            ThreadPool& threads);

  // COLLECTIVE, with the same decoded kRun plan on all ranks: applies the plan, runs the forward
  // pass, samples, and gathers the logits of scored prompts. An error leaves the job unusable;
  // Internal, naming rank and step, when the ranks' digests differ. `sink` is called on rank 0
  // alone. `result` keeps its memory from step to step.
  absl::Status Execute(const StepPlanView& plan, const PromptLogitsSink& sink, StepResult& result);

  // Before the first step, on all ranks alike: what Execute has checked after each forward pass;
  // null: nothing. A difference is an Internal error of Execute, the same on all ranks.
  void set_checks(TpChecker* tp, const CheckedBackend* attention) {
    tp_checker_ = tp;
    checked_attention_ = attention;
  }
  // COLLECTIVE, after the last step: rank 0 logs what the checks found.
  absl::Status LogChecks();

 private:
  StepRunner(const PlanLimits& limits, const std::vector<Range>& vocab_ranges, Decoder& decoder,
             KvPool& pool, Communicator& communicator, ThreadPool& threads);

  absl::Status ChangePool(const StepPlanView& plan);
  absl::Status RunChecks();
  absl::Status CompareDigests(const StepPlanView& plan, std::span<const uint64_t> digests) const;
  absl::Status GatherScores(const StepPlanView& plan, const PromptLogitsSink& sink);
  absl::Status GatherPiece(int64_t first_logits_row, int64_t rows);

  const PlanLimits limits_;
  const std::vector<Range> vocab_ranges_;
  Decoder& decoder_;
  KvPool& pool_;
  Communicator& communicator_;
  BatchState state_;
  Sampler sampler_;
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
