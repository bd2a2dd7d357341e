// Turns requests into steps. Lives on rank 0, which alone knows requests; every decision reaches
// the other ranks through the StepPlan.
//
// Order: first come, first served. A step takes the running requests first (one decode token or the
// next prefill chunk each), then admits waiting ones, under max_num_batched_tokens and
// max_num_seqs. A request is admitted only when the blocks of its whole possible length can be
// reserved, so a running request never runs out of blocks.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <vector>

#include "cache/block_allocator.h"
#include "runtime/request.h"
#include "runtime/step_plan.h"

namespace lockstep {

// Not thread-safe: everything happens on rank 0's engine thread.
class Scheduler {
 public:
  // `max_score_rows` bounds the rows of full logits a step makes for scored prompts (>= 1).
  Scheduler(const PlanLimits& limits, int64_t max_score_rows);
  ~Scheduler();

  // Queues the request. InvalidArgument, before any work, for what can never run: see
  // Engine::Submit.
  absl::StatusOr<RequestId> Submit(Request request);

  // No request is queued or running.
  bool idle() const { return waiting_.empty() && running_.empty(); }
  int64_t num_running() const { return static_cast<int64_t>(running_.size()); }
  int64_t num_waiting() const { return static_cast<int64_t>(waiting_.size()); }

  // Fills the plan of the next step; false, with an empty plan, when idle. Every planned step must
  // be followed by Update before the next.
  bool Schedule(StepPlan& plan);

  // Rows of a scored request of the planned step: passes them to its callback. Request `b` is the
  // plan's, positions ascend.
  void DeliverPromptLogits(int64_t b, int64_t first_position, int64_t rows, const float* logits);

  // The planned step is done: `sampled` holds one token for each request with StepOutput::kSample,
  // in the plan's order; kFailedToken when its logits held NaN or infinity. Sends the events and
  // frees what has ended.
  void Update(std::span<const int32_t> sampled);

  // Of the planned step: how many prompt tokens it computes.
  int64_t planned_prompt_tokens() const { return planned_prompt_tokens_; }
  const BlockAllocator& blocks() const { return blocks_; }

 private:
  struct Entry;

  bool Admit(StepPlan& plan);
  bool Plan(Entry& entry, StepPlan& plan);
  void AddRows(Entry& entry, int64_t count, StepPlan& plan);
  void AddBlocks(Entry& entry, int64_t num_tokens, StepPlan& plan);
  void Accept(Entry& entry, int32_t token);
  void Finish(Entry& entry, RequestEvent event);
  void FreeFinished();

  const PlanLimits limits_;
  const int64_t max_score_rows_;
  BlockAllocator blocks_;
  RequestId next_id_ = 1;
  uint64_t next_step_ = 1;
  std::deque<std::unique_ptr<Entry>> waiting_;
  std::vector<std::unique_ptr<Entry>> running_;  // in order of admission
  std::vector<int32_t> free_slots_;              // of the batch state; taken from the back
  std::vector<int32_t> freed_slots_;             // to be told in the next plan

  // Of the step being planned.
  std::vector<Entry*> scheduled_;  // [B], the plan's order
  int64_t tokens_left_ = 0;
  int64_t score_rows_left_ = 0;
  int64_t planned_prompt_tokens_ = 0;
};

}  // namespace lockstep
