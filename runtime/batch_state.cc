#include "runtime/batch_state.h"

#include <algorithm>

#include "cache/block_table.h"

namespace lockstep {

namespace {

template <typename... Args>
absl::Status OutOfStep(const StepPlanView& plan, const absl::FormatSpec<Args...>& format,
                       const Args&... args) {
  return absl::InternalError(absl::StrFormat("step %d: ranks are out of step: ", plan.step) +
                             absl::StrFormat(format, args...));
}

}  // namespace

BatchState::BatchState(const PlanLimits& limits)
    : limits_(limits),
      slots_(static_cast<size_t>(limits.max_num_seqs)),
      block_tables_(static_cast<size_t>(limits.max_num_seqs * limits.max_blocks_per_request())) {}

absl::Status BatchState::Apply(const StepPlanView& plan) {
  if (plan.step <= last_step_) {
    return OutOfStep(plan, "the last one was step %d", last_step_);
  }
  last_step_ = plan.step;
  LOCKSTEP_RETURN_IF_ERROR(ApplyChanges(plan));
  LOCKSTEP_RETURN_IF_ERROR(ApplyBlockRuns(plan));
  rope_lengths_.resize(plan.token_ids.size());
  first_logits_rows_.clear();
  sample_rows_.clear();
  int32_t logits_row = 0;
  for (int64_t b = 0; b < plan.num_requests(); ++b) {
    LOCKSTEP_RETURN_IF_ERROR(ApplyRequest(plan, b));
    first_logits_rows_.push_back(logits_row);
    const PlanNewRequest& request = slots_[plan.request_slots[b]].request;
    if (plan.outputs[b] == StepOutput::kSample) {
      sample_rows_.push_back({.logits_row = logits_row++,
                              .position = plan.seq_lens[b],
                              .seed = request.seed,
                              .temperature = request.temperature,
                              .top_p = request.top_p,
                              .top_k = request.top_k});
    } else if (plan.outputs[b] == StepOutput::kScore) {
      logits_row += plan.query_start_loc[b + 1] - plan.query_start_loc[b];
    }
  }
  PackBlockTables(plan);
  forward_batch_.token_ids = plan.token_ids;
  forward_batch_.positions = plan.positions;
  forward_batch_.rope_lengths = rope_lengths_;
  forward_batch_.logits_rows = plan.logits_rows;
  forward_batch_.attention.query_start_loc = plan.query_start_loc;
  forward_batch_.attention.seq_lens = plan.seq_lens;
  forward_batch_.attention.slot_mapping = plan.slot_mapping;
  return absl::OkStatus();
}

absl::Status BatchState::ApplyChanges(const StepPlanView& plan) {
  for (const int32_t slot : plan.freed_slots) {
    if (!slots_[slot].in_use) return OutOfStep(plan, "slot %d is freed but was free", slot);
    slots_[slot] = {};
  }
  for (const PlanNewRequest& request : plan.new_requests) {
    Slot& slot = slots_[request.slot];
    if (slot.in_use) return OutOfStep(plan, "slot %d is taken twice", request.slot);
    slot = {.in_use = true, .num_tokens = 0, .num_blocks = 0, .request = request};
  }
  return absl::OkStatus();
}

absl::Status BatchState::ApplyBlockRuns(const StepPlanView& plan) {
  const int32_t* blocks = plan.blocks.data();
  for (const PlanBlockRun& run : plan.block_runs) {
    Slot& slot = slots_[run.slot];
    if (!slot.in_use || run.first_index > slot.num_blocks) {
      return OutOfStep(plan, "blocks [%d, +%d) for slot %d, which has %d", run.first_index,
                       run.count, run.slot, slot.num_blocks);
    }
    std::copy_n(blocks, run.count, BlockTable(run.slot) + run.first_index);
    blocks += run.count;
    slot.num_blocks = std::max<int64_t>(slot.num_blocks, run.first_index + run.count);
  }
  return absl::OkStatus();
}

// Checks that the request goes on where it stopped, and that the write map (slot mapping) agrees
// with the read map (block table).
absl::Status BatchState::ApplyRequest(const StepPlanView& plan, int64_t b) {
  const int32_t slot_index = plan.request_slots[b];
  Slot& slot = slots_[slot_index];
  const int64_t begin = plan.query_start_loc[b];
  const int64_t end = plan.query_start_loc[b + 1];
  const int64_t seq_len = plan.seq_lens[b];
  if (!slot.in_use || slot.num_tokens != seq_len - (end - begin)) {
    return OutOfStep(plan, "request %d in slot %d adds %d tokens up to %d, but has %d", b,
                     slot_index, end - begin, seq_len, slot.num_tokens);
  }
  const int64_t block_size = limits_.block_size;
  if (BlocksForTokens(seq_len, block_size) > slot.num_blocks) {
    return OutOfStep(plan, "request %d has %d tokens and only %d blocks of %d", b, seq_len,
                     slot.num_blocks, block_size);
  }
  const int32_t* table = BlockTable(slot_index);
  for (int64_t row = begin; row < end; ++row) {
    const int64_t position = plan.positions[row];
    const int64_t expected = table[position / block_size] * block_size + position % block_size;
    if (plan.slot_mapping[row] != expected) {
      return OutOfStep(plan, "row %d is to be written to slot %d, the block table says %d", row,
                       plan.slot_mapping[row], expected);
    }
    rope_lengths_[row] = std::max(slot.request.prompt_length, static_cast<int32_t>(position + 1));
  }
  slot.num_tokens = seq_len;
  return absl::OkStatus();
}

void BatchState::PackBlockTables(const StepPlanView& plan) {
  int64_t max_blocks = 0;
  for (const int32_t seq_len : plan.seq_lens) {
    max_blocks = std::max(max_blocks, BlocksForTokens(seq_len, limits_.block_size));
  }
  const size_t size = static_cast<size_t>(plan.num_requests() * max_blocks);
  if (packed_block_tables_.size() < size) packed_block_tables_.resize(size);
  for (int64_t b = 0; b < plan.num_requests(); ++b) {
    std::copy_n(BlockTable(plan.request_slots[b]),
                BlocksForTokens(plan.seq_lens[b], limits_.block_size),
                packed_block_tables_.data() + b * max_blocks);
  }
  forward_batch_.attention.block_tables = {packed_block_tables_.data(), size};
  forward_batch_.attention.max_blocks = max_blocks;
}

}  // namespace lockstep
