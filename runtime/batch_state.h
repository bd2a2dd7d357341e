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

// Where a step finds the tokens that the steps before it sampled.
enum class LastTokens {
  kOnHost,    // they were accepted before the plan is applied
  kOnDevice,  // DeviceDecoder::last_tokens: accepted up to steps_in_flight - 1 steps late
};

// Applied steps are accepted in their order, at the latest `steps_in_flight` applications later.
class BatchState {
 public:
  // `vocab`: this rank's part of the vocabulary.
  BatchState(const PlanLimits& limits, Range vocab, LastTokens last_tokens = LastTokens::kOnHost,
             int steps_in_flight = 1);

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
  // The slots of sample_rows().
  std::span<const int32_t> sample_slots() const { return sample_slots_; }
  // Row of logits_rows where each request's rows start. [B]
  std::span<const int32_t> first_logits_rows() const { return first_logits_rows_; }

  // The tokens that sample_rows() of the oldest step not accepted yet gave: each becomes its slot's
  // last sampled one, unless a later plan has given the slot away.
  void Accept(std::span<const int32_t> tokens);

  // Of the last applied plan: a hash of all plans up to it, and of the tokens of all steps but the
  // last `steps_in_flight`, whether or not later ones have been accepted. Equal on all ranks, or
  // they have parted.
  uint64_t digest() const { return digest_; }

 private:
  struct Slot {
    bool in_use = false;
    int64_t num_tokens = 0;  // computed so far
    int64_t num_blocks = 0;  // known entries of the block table
    uint32_t tenant = 0;     // counts those who had the slot
    bool has_sampled = false;
    int32_t last_sampled = 0;
    PlanNewRequest request;
    std::optional<LogitAdjuster> adjuster;
  };

  // Whom a sampled token belongs to.
  struct Tenant {
    int32_t slot = 0;
    uint32_t tenant = 0;
  };
  size_t Place(uint64_t step) const { return step % pending_.size(); }

  absl::Status ApplyChanges(const StepPlanView& plan);
  void Fill(Slot& slot, const PlanNewRequest& request, const StepPlanView& plan);
  absl::Status ApplyBlockRuns(const StepPlanView& plan);
  absl::Status ApplyRequest(const StepPlanView& plan, int64_t b);
  absl::Status ApplyTokens(const StepPlanView& plan, int64_t b);
  void AddOutputs(const StepPlanView& plan, int64_t b);
  void FoldPlan(const StepPlanView& plan);
  void BeginPending();
  int32_t* BlockTable(int64_t slot) {
    return block_tables_.data() + slot * limits_.max_blocks_per_request();
  }

  const PlanLimits limits_;
  const Range vocab_;
  const LastTokens last_tokens_;
  uint64_t last_step_ = 0;
  uint64_t num_applied_ = 0;
  uint64_t num_accepted_ = 0;
  std::vector<std::vector<Tenant>> pending_;  // [steps_in_flight] who samples in a step
  uint64_t plan_digest_ = 0;
  uint64_t token_digest_ = 0;
  // [steps_in_flight] token_digest_ after so many accepted steps, the latest ones.
  std::vector<uint64_t> token_digests_;
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
