// What the scheduler knows of one choice of a request. Included by the scheduler's sources alone.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cache/prefix_index.h"
#include "runtime/scheduler.h"

namespace lockstep {

// A choice is in exactly one place: waiting (in waiting_), in the batch (slot >= 0, in running_),
// landing (preempted while a planned step with rows of it was still to come), or ended.
struct Scheduler::Choice {
  RequestId id = 0;
  int32_t index = 0;
  std::shared_ptr<const Request> request;  // its prompt has moved to `tokens` of choice 0
  // Choice 0, whose prompt blocks the others share; until the choice is admitted.
  ChoicePtr source;

  std::vector<int32_t> tokens;  // the prompt, then what is known of the generated ones
  int64_t prompt_length = 0;
  int64_t max_length = 0;     // prompt + generated tokens at most
  int64_t num_in_flight = 0;  // tokens that planned steps will sample
  int64_t num_steps_in_flight = 0;

  // In the batch.
  int32_t slot = -1;
  int64_t num_planned = 0;  // tokens whose K and V are in the blocks when planned steps are done
  uint64_t last_planned_step = 0;
  int64_t num_planned_before = 0;  // num_planned before that step
  std::vector<BlockId> blocks;
  int64_t num_blocks_sent = 0;  // entries the other ranks know
  PrefixIndex::Chain chain;     // blocks that are in the prefix index

  int64_t num_prompt_rows_delivered = 0;  // scored, or their logprobs delivered
  bool admitted = false;                  // at least once
  bool landing = false;
  bool ended = false;
  bool failed = false;      // the content of its blocks is not to be trusted
  std::string score_error;  // why a scored prompt failed

  const SamplingParams& sampling() const { return request->sampling; }
  Order order() const { return {request->priority, id, index}; }
  bool scores() const { return request->on_prompt_logits != nullptr; }
  bool in_batch() const { return slot >= 0; }
  // Tokens including those in flight.
  int64_t length() const { return static_cast<int64_t>(tokens.size()) + num_in_flight; }
  // The last token of the longest sequence is never computed: nothing follows it.
  int64_t num_left() const {
    return std::min(length(), scores() ? prompt_length : max_length - 1) - num_planned;
  }
  bool wants_prompt_rows() const {
    return (scores() || sampling().num_prompt_logprobs.has_value()) && index == 0 &&
           num_prompt_rows_delivered < prompt_length - (scores() ? 0 : 1);
  }
};

}  // namespace lockstep
