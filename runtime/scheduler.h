// Turns requests into steps. Lives on rank 0, which alone knows requests; every decision reaches
// the other ranks through the StepPlan.
//
// Order: by priority, then first come, first served. A step takes the running requests first (one
// decode token or the next prefill chunk each), then admits waiting ones, under
// max_num_batched_tokens and max_num_seqs. A request gets the blocks of all its known tokens when
// it is admitted, and one more whenever its last one is full; where there is none, the last running
// request in order is preempted: it loses its blocks, waits again, and computes its tokens anew.
#pragma once

#include <cstdint>
#include <deque>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "cache/block_allocator.h"
#include "cache/prefix_index.h"
#include "runtime/request.h"
#include "runtime/scheduler_stats.h"
#include "runtime/step_plan.h"
#include "runtime/step_runner.h"

namespace lockstep {

struct SchedulerOptions {
  int64_t max_score_rows = 1;  // rows of full logits a step makes for scored prompts and logprobs
  bool enable_prefix_caching = true;
  bool poison_freed_blocks = false;    // tells freed blocks to the ranks, to be filled with NaN
  std::vector<int32_t> end_token_ids;  // the model's
  // Prompts of at most so many tokens share their prefixes, and blocks up to there: with dynamic
  // RoPE the keys of longer ones depend on the length of the prompt.
  int64_t max_shared_tokens = std::numeric_limits<int64_t>::max();
};

// One request's part of a planned step, for the step log.
struct ScheduledRows {
  RequestId id = 0;
  int32_t choice = 0;
  int64_t first_position = 0;
  int64_t count = 0;
  int64_t prompt_tokens = 0;  // of count
};

// Not thread-safe: everything happens on rank 0's engine thread, but Check.
class Scheduler {
 public:
  Scheduler(const PlanLimits& limits, SchedulerOptions options);
  ~Scheduler();

  // InvalidArgument, before any work, for what can never run: see Engine::Submit. Any thread.
  absl::Status Check(const Request& request) const;
  // Queues a checked request under a new id.
  void Submit(RequestId id, Request request);
  // Ends what is left of the request; its choices get a final event (kCancelled). Nothing happens
  // when it has ended.
  void Cancel(RequestId id);
  void CancelAll();

  // No request is queued or running, and no planned step waits for its Update.
  bool idle() const { return choices_.empty() && in_flight_.empty(); }
  // Planned steps that wait for their Update.
  int64_t num_in_flight() const { return static_cast<int64_t>(in_flight_.size()); }

  // Fills the plan of the next step; false, with an empty plan, when there is nothing to do before
  // the next Update, or at all. The plan must be broadcast. May be called again before Update: the
  // tokens of steps in flight are then planned for without being known.
  bool Schedule(StepPlan& plan);

  // Rows of a scored request of the last planned step: passes them to its callback. Request `b` is
  // the plan's, positions ascend.
  void DeliverPromptLogits(int64_t b, int64_t first_position, int64_t rows, const float* logits);

  // The oldest step in flight is done, with this result. Sends the events and frees what has ended.
  void Update(const StepResult& result);

  // Of the last planned step.
  int64_t planned_prompt_tokens() const { return planned_prompt_tokens_; }
  // Of the oldest step that waits for its Update.
  std::vector<ScheduledRows> OldestRows() const;

  SchedulerStats stats() const;

  // Internal, naming the block or request, when blocks, tables, prefix index and queues contradict
  // each other. Walks over everything: for tests and debug builds.
  absl::Status CheckInvariants() const;

 private:
  struct Choice;
  using ChoicePtr = std::shared_ptr<Choice>;
  // Place in the queue: lower goes first.
  using Order = std::tuple<int32_t, RequestId, int32_t>;  // priority, id, choice

  // A choice's rows in a planned step.
  struct PlannedChoice {
    ChoicePtr choice;
    StepOutput output = StepOutput::kNone;
    int64_t first_position = 0;
    int64_t count = 0;
    int64_t num_logprob_targets = 0;
  };
  using PlannedStep = std::vector<PlannedChoice>;  // [B], the plan's order

  // Planning (scheduler.cc).
  void BeginStep(StepPlan& plan);
  void PlanRunning(StepPlan& plan);
  void TellFreedSlots(StepPlan& plan);
  void UntellFreedSlots(const StepPlan& plan);
  bool Admit(StepPlan& plan);
  bool IsBlocked(const Choice& choice) const;
  bool TakeBlocks(Choice& choice, StepPlan& plan);
  bool CanFork(const Choice& choice) const;
  bool Reserve(int64_t num_blocks, Choice& choice);
  void TellNewRequest(const Choice& choice, StepPlan& plan) const;
  void Preempt(Choice& choice);
  bool Plan(const ChoicePtr& choice, StepPlan& plan);
  StepOutput OutputOf(const Choice& choice, int64_t count) const;
  void AddRows(const PlannedChoice& planned, StepPlan& plan);
  int64_t AddLogprobTargets(const PlannedChoice& planned, StepPlan& plan) const;
  void AddBlocks(Choice& choice, int64_t num_tokens, StepPlan& plan);
  void EndStep(StepPlan& plan);
  bool UsesPrefixes(const Choice& choice) const;
  void IndexBlocks(Choice& choice);
  void LeaveBatch(Choice& choice);

  // Results (scheduler_results.cc).
  void Land(const PlannedChoice& planned, int32_t token, PositionLogprobs logprobs);
  void Accept(Choice& choice, int32_t token, PositionLogprobs logprobs);
  void DeliverPromptLogprobs(const PlannedChoice& planned,
                             std::span<const PositionLogprobs> logprobs);
  bool IsEndToken(const Choice& choice, int32_t token) const;
  void Finish(Choice& choice, RequestEvent event);
  void End(Choice& choice);

  const PlanLimits limits_;
  const SchedulerOptions options_;
  BlockAllocator blocks_;
  PrefixIndex prefixes_;
  uint64_t next_step_ = 1;

  absl::flat_hash_map<RequestId, std::vector<ChoicePtr>> choices_;  // that have not ended
  std::map<Order, ChoicePtr> waiting_;
  std::vector<ChoicePtr> running_;    // by Order; ended ones leave at the end of Update or Cancel
  std::vector<int32_t> free_slots_;   // of the batch state; taken from the back
  std::vector<int32_t> freed_slots_;  // to be told in the next plan
  std::vector<int32_t> lost_blocks_;  // with poison_freed_blocks: to be told in the next plan

  std::set<Order> landing_;  // preempted, to wait again once their last step has landed

  // The head of the queue did not fit, and nothing has become free since.
  struct {
    Order order;
    PrefixIndex::Chain chain;  // as far as the prefix cache knew its tokens
    uint64_t num_releases = 0;
    size_t num_running = 0;
  } blocked_;

  std::deque<PlannedStep> in_flight_;  // oldest first
  std::vector<PlannedStep> spare_;     // keep their memory

  // Of the step being planned.
  int64_t tokens_left_ = 0;
  int64_t score_rows_left_ = 0;
  int64_t planned_prompt_tokens_ = 0;

  SchedulerStats stats_;
};

}  // namespace lockstep
