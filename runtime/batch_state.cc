#include "runtime/batch_state.h"

#include <algorithm>

#include "cache/block_table.h"
#include "runtime/core/hash.h"

namespace lockstep {

namespace {

template <typename... Args>
absl::Status OutOfStep(const StepPlanView& plan, const absl::FormatSpec<Args...>& format,
                       const Args&... args) {
  return absl::InternalError(absl::StrFormat("step %d: ranks are out of step: ", plan.step) +
                             absl::StrFormat(format, args...));
}

}  // namespace

BatchState::BatchState(const PlanLimits& limits, Range vocab, LastTokens last_tokens,
                       int steps_in_flight)
    : limits_(limits),
      vocab_(vocab),
      last_tokens_(last_tokens),
      pending_(static_cast<size_t>(steps_in_flight)),
      token_digests_(static_cast<size_t>(steps_in_flight)),
      slots_(static_cast<size_t>(limits.max_num_seqs)),
      block_tables_(static_cast<size_t>(limits.max_num_seqs * limits.max_blocks_per_request())) {}

absl::Status BatchState::Apply(const StepPlanView& plan) {
  if (plan.step <= last_step_) {
    return OutOfStep(plan, "the last one was step %d", last_step_);
  }
  last_step_ = plan.step;
  LOCKSTEP_RETURN_IF_ERROR(ApplyChanges(plan));
  LOCKSTEP_RETURN_IF_ERROR(ApplyBlockRuns(plan));
  token_ids_.assign(plan.token_ids.begin(), plan.token_ids.end());
  rope_lengths_.resize(plan.token_ids.size());
  first_logits_rows_.clear();
  sample_rows_.clear();
  sample_slots_.clear();
  logprob_rows_.clear();
  next_target_ = 0;
  next_logits_row_ = 0;
  for (int64_t b = 0; b < plan.num_requests(); ++b) {
    LOCKSTEP_RETURN_IF_ERROR(ApplyRequest(plan, b));
    LOCKSTEP_RETURN_IF_ERROR(ApplyTokens(plan, b));
    AddOutputs(plan, b);
  }
  FoldPlan(plan);
  BeginPending();
  forward_batch_.token_ids = token_ids_;
  forward_batch_.positions = plan.positions;
  forward_batch_.rope_lengths = rope_lengths_;
  forward_batch_.logits_rows = plan.logits_rows;
  forward_batch_.attention.query_start_loc = plan.query_start_loc;
  forward_batch_.attention.seq_lens = plan.seq_lens;
  forward_batch_.attention.slot_mapping = plan.slot_mapping;
  forward_batch_.table_changes = {plan.block_runs, plan.blocks};
  // In place: a step's cost must not grow with the length of what lies behind.
  forward_batch_.attention.block_tables = block_tables_;
  forward_batch_.attention.max_blocks = limits_.max_blocks_per_request();
  forward_batch_.attention.table_rows = plan.request_slots;
  return absl::OkStatus();
}

absl::Status BatchState::ApplyChanges(const StepPlanView& plan) {
  for (const int32_t slot : plan.freed_slots) {
    if (!slots_[slot].in_use) return OutOfStep(plan, "slot %d is freed but was free", slot);
    const uint32_t tenant = slots_[slot].tenant;
    slots_[slot] = {};
    slots_[slot].tenant = tenant;
  }
  next_history_ = 0;
  next_bias_ = 0;
  next_banned_ = 0;
  for (const PlanNewRequest& request : plan.new_requests) {
    Slot& slot = slots_[request.slot];
    if (slot.in_use) return OutOfStep(plan, "slot %d is taken twice", request.slot);
    Fill(slot, request, plan);
  }
  return absl::OkStatus();
}

void BatchState::Fill(Slot& slot, const PlanNewRequest& request, const StepPlanView& plan) {
  slot.in_use = true;
  ++slot.tenant;
  slot.num_tokens = request.num_computed;
  slot.request = request;
  const std::span<const int32_t> history =
      plan.history.subspan(next_history_, static_cast<size_t>(request.num_history));
  const LogitAdjustments adjustments{
      .repetition_penalty = request.repetition_penalty,
      .frequency_penalty = request.frequency_penalty,
      .presence_penalty = request.presence_penalty,
      .bias = plan.logit_bias.subspan(next_bias_, static_cast<size_t>(request.num_bias)),
      .banned_ids = plan.banned_ids.subspan(next_banned_, static_cast<size_t>(request.num_banned)),
      .banned_below = request.banned_below};
  next_history_ += history.size();
  next_bias_ += adjustments.bias.size();
  next_banned_ += adjustments.banned_ids.size();
  if (request.repetition_penalty != 1 || request.frequency_penalty != 0 ||
      request.presence_penalty != 0 || !adjustments.bias.empty() ||
      !adjustments.banned_ids.empty()) {
    slot.adjuster.emplace(vocab_, adjustments, history, request.prompt_length);
  }
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

// Puts the last sampled token, or where it will be found, where the plan could not name it yet.
absl::Status BatchState::ApplyTokens(const StepPlanView& plan, int64_t b) {
  const int32_t end = plan.query_start_loc[b + 1];
  for (int32_t row = plan.query_start_loc[b]; row < end; ++row) {
    if (token_ids_[row] != kLastSampledToken) continue;
    const int32_t slot = plan.request_slots[b];
    if (!slots_[slot].has_sampled || row != end - 1) {
      return OutOfStep(plan, "row %d goes on from the last token of slot %d, which has none", row,
                       slot);
    }
    token_ids_[row] = last_tokens_ == LastTokens::kOnDevice ? -1 - slot : slots_[slot].last_sampled;
  }
  return absl::OkStatus();
}

void BatchState::AddOutputs(const StepPlanView& plan, int64_t b) {
  Slot& slot = slots_[plan.request_slots[b]];
  const PlanNewRequest& request = slot.request;
  const StepOutput output = plan.outputs[b];
  const int32_t count = plan.query_start_loc[b + 1] - plan.query_start_loc[b];
  const int32_t num_logits_rows = WantsAllLogits(output) ? count : Samples(output) ? 1 : 0;
  first_logits_rows_.push_back(next_logits_row_);
  if (WantsPromptLogprobs(output)) {
    for (int32_t i = 0; i < count; ++i) {
      const int32_t target = plan.logprob_targets[next_target_++];
      if (target < 0) continue;
      logprob_rows_.push_back({.logits_row = next_logits_row_ + i,
                               .token = target,
                               .num_top = std::max(0, request.num_prompt_logprobs)});
    }
  }
  next_logits_row_ += num_logits_rows;
  if (!Samples(output)) return;
  slot.has_sampled |= last_tokens_ == LastTokens::kOnDevice;
  sample_slots_.push_back(plan.request_slots[b]);
  sample_rows_.push_back({.logits_row = next_logits_row_ - 1,
                          .position = plan.seq_lens[b],
                          .seed = request.seed,
                          .temperature = request.temperature,
                          .top_p = request.top_p,
                          .min_p = request.min_p,
                          .top_k = request.top_k,
                          .adjuster = slot.adjuster.has_value() ? &*slot.adjuster : nullptr,
                          .num_logprobs = request.num_logprobs});
}

// Digests cover tokens up to the step that every rank has accepted by now, be it fast or slow.
void BatchState::BeginPending() {
  LOCKSTEP_CHECK(num_applied_ - num_accepted_ < pending_.size());
  std::vector<Tenant>& pending = pending_[Place(num_applied_)];
  pending.clear();
  for (const int32_t slot : sample_slots_) pending.push_back({slot, slots_[slot].tenant});
  ++num_applied_;
  const uint64_t covered = num_applied_ - std::min<uint64_t>(num_applied_, pending_.size());
  const uint64_t tokens = token_digests_[Place(covered)];
  digest_ = HashBytes(&tokens, sizeof(tokens), plan_digest_);
}

void BatchState::Accept(std::span<const int32_t> tokens) {
  LOCKSTEP_CHECK(num_accepted_ < num_applied_);
  const std::vector<Tenant>& pending = pending_[Place(num_accepted_)];
  LOCKSTEP_CHECK(tokens.size() == pending.size());
  for (size_t i = 0; i < tokens.size(); ++i) {
    Slot& slot = slots_[pending[i].slot];
    if (slot.tenant != pending[i].tenant || !slot.in_use) continue;
    // A failed request's next row, planned before that was known, computes something that nobody
    // will look at.
    slot.last_sampled = std::max(tokens[i], 0);
    slot.has_sampled = true;
    if (slot.adjuster.has_value()) slot.adjuster->Add(slot.last_sampled);
  }
  token_digest_ = HashBytes(tokens.data(), tokens.size_bytes(), token_digest_);
  ++num_accepted_;
  token_digests_[Place(num_accepted_)] = token_digest_;
}

void BatchState::FoldPlan(const StepPlanView& plan) {
  const auto fold = [this](const auto& items) {
    plan_digest_ = HashBytes(items.data(), items.size() * sizeof(items[0]), plan_digest_);
  };
  plan_digest_ = HashBytes(&plan.step, sizeof(plan.step), plan_digest_);
  fold(plan.freed_slots);
  fold(plan.new_requests);
  fold(plan.history);
  fold(plan.logit_bias);
  fold(plan.banned_ids);
  fold(plan.block_runs);
  fold(plan.blocks);
  fold(plan.block_copies);
  fold(plan.token_ids);
  fold(plan.request_slots);
  fold(plan.outputs);
  fold(plan.seq_lens);
  fold(plan.logits_rows);
  fold(plan.logprob_targets);
}

}  // namespace lockstep
