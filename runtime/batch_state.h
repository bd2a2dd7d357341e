// What every rank knows of the running requests: block tables, lengths and sampling state, changed
// by plans and sampled tokens alone, and the ForwardBatch of a step made from them.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "model/forward_batch.h"
#include "runtime/core/range.h"
#include "runtime/logprobs.h"
#include "runtime/sampler.h"
#include "runtime/step_plan.h"

namespace lockstep {

class BatchState {
 public:
  // `vocab`: this rank's part of the vocabulary.
  BatchState(const PlanLimits& limits, Range vocab);

  // Applies a decoded kRun plan and makes its batch. Internal, naming step, request and field, when
  // the plan contradicts what earlier plans said (a lost or repeated plan, a slot mapping that
  // differs from the block table): the job must end. `plan` must outlive the batch.
  absl::Status Apply(const StepPlanView& plan);

  // Of the last applied plan. Valid until the next Apply.
  const ForwardBatch& forward_batch() const { return forward_batch_; }
  // Rows to sample, in the plan's order; SampleRow::logits_row counts within logits_rows.
  std::span<const SampleRow> sample_rows() const { return sample_rows_; }
  // Rows of prompt logprobs, in the plan's order.
  std::span<const LogprobRow> logprob_rows() const { return logprob_rows_; }
  // Row of logits_rows where each request's rows start. [B]
  std::span<const int32_t> first_logits_rows() const { return first_logits_rows_; }

  // The tokens that sample_rows() gave: each becomes its slot's last sampled one.
  void Accept(std::span<const int32_t> tokens);

  // A running hash of everything that was applied and accepted: equal on all ranks, or they have
  // parted. The same plans give the same digest whether their tokens were known or
  // kLastSampledToken.
  uint64_t digest() const { return digest_; }

 private:
  struct Slot {
    bool in_use = false;
    int64_t num_tokens = 0;  // computed so far
    int64_t num_blocks = 0;  // known entries of the block table
    int32_t last_sampled = kLastSampledToken;
    PlanNewRequest request;
    std::optional<LogitAdjuster> adjuster;
  };

  absl::Status ApplyChanges(const StepPlanView& plan);
  void Fill(Slot& slot, const PlanNewRequest& request, const StepPlanView& plan);
  absl::Status ApplyBlockRuns(const StepPlanView& plan);
  absl::Status ApplyRequest(const StepPlanView& plan, int64_t b);
  absl::Status ApplyTokens(const StepPlanView& plan, int64_t b);
  void AddOutputs(const StepPlanView& plan, int64_t b);
  void FoldPlan(const StepPlanView& plan);
  int32_t* BlockTable(int64_t slot) {
    return block_tables_.data() + slot * limits_.max_blocks_per_request();
  }

  const PlanLimits limits_;
  const Range vocab_;
  uint64_t last_step_ = 0;
  uint64_t digest_ = 0;
  std::vector<Slot> slots_;            // [max_num_seqs]
  std::vector<int32_t> block_tables_;  // [max_num_seqs, max_blocks_per_request]

  // Where ApplyChanges and AddOutputs stand in the plan's sections.
  size_t next_history_ = 0;
  size_t next_bias_ = 0;
  size_t next_banned_ = 0;
  size_t next_target_ = 0;
  int32_t next_logits_row_ = 0;

  // The step's batch, as far as it is not in the plan itself.
  std::vector<int32_t> token_ids_;          // [T]
  std::vector<int32_t> rope_lengths_;       // [T]
  std::vector<int32_t> first_logits_rows_;  // [B]
  std::vector<SampleRow> sample_rows_;
  std::vector<int32_t> sample_slots_;  // of sample_rows_
  std::vector<LogprobRow> logprob_rows_;
  ForwardBatch forward_batch_;
};

}  // namespace lockstep
