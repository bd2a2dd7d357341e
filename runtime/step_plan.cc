#include "runtime/step_plan.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <iterator>

#include "runtime/request.h"

namespace lockstep {

namespace {

static_assert(std::endian::native == std::endian::little, "the wire format is little-endian");

constexpr uint32_t kMagic = 0x4e4c504c;  // "LPLN"
constexpr uint32_t kVersion = 2;
constexpr int kNumSections = 18;

struct PlanHeader {
  uint32_t magic = kMagic;
  uint32_t version = kVersion;
  uint64_t total_bytes = 0;
  uint64_t step = 0;
  uint32_t kind = 0;
  uint32_t counts[kNumSections] = {};
  uint32_t reserved = 0;
};
static_assert(sizeof(PlanHeader) == 104 && sizeof(PlanHeader) <= kPlanFirstPartBytes);

constexpr int64_t PaddedBytes(int64_t bytes) { return (bytes + 7) / 8 * 8; }

// Calls visit(section index, name, field) for every field, in the order on the wire.
template <typename Plan, typename Visit>
void VisitSections(Plan& plan, Visit visit) {
  visit(0, "freed_slots", plan.freed_slots);
  visit(1, "new_requests", plan.new_requests);
  visit(2, "history", plan.history);
  visit(3, "logit_bias", plan.logit_bias);
  visit(4, "banned_ids", plan.banned_ids);
  visit(5, "block_runs", plan.block_runs);
  visit(6, "blocks", plan.blocks);
  visit(7, "poisoned_blocks", plan.poisoned_blocks);
  visit(8, "block_copies", plan.block_copies);
  visit(9, "slot_mapping", plan.slot_mapping);
  visit(10, "token_ids", plan.token_ids);
  visit(11, "positions", plan.positions);
  visit(12, "request_slots", plan.request_slots);
  visit(13, "outputs", plan.outputs);
  visit(14, "seq_lens", plan.seq_lens);
  visit(15, "query_start_loc", plan.query_start_loc);
  visit(16, "logits_rows", plan.logits_rows);
  visit(17, "logprob_targets", plan.logprob_targets);
}

// The most entries each section may hold under the limits.
void MaxCounts(const PlanLimits& limits, int64_t (&counts)[kNumSections]) {
  const int64_t tokens = limits.max_num_batched_tokens;
  const int64_t requests = limits.max_num_seqs;
  const int64_t in_order[kNumSections] = {requests,                                    // freed
                                          requests,                                    // new
                                          requests * limits.max_model_len,             // history
                                          requests * limits.vocab_size,                // bias
                                          requests * limits.vocab_size,                // banned
                                          requests,                                    // runs
                                          requests * limits.max_blocks_per_request(),  // blocks
                                          limits.num_blocks,                           // poisoned
                                          requests,                                    // copies
                                          tokens,
                                          tokens,
                                          tokens,
                                          requests,
                                          requests,
                                          requests,
                                          requests + 1,
                                          limits.max_logits_rows,
                                          limits.max_logits_rows};
  std::copy(std::begin(in_order), std::end(in_order), counts);
}

template <typename... Args>
absl::Status BadPlan(const absl::FormatSpec<Args...>& format, const Args&... args) {
  return absl::InvalidArgumentError("step plan: " + absl::StrFormat(format, args...));
}

absl::Status CheckHeader(const PlanHeader& header, const PlanLimits& limits) {
  if (header.magic != kMagic) {
    return BadPlan("wrong magic 0x%08x, expected 0x%08x: ranks are out of step", header.magic,
                   kMagic);
  }
  if (header.version != kVersion) {
    return BadPlan("version %d, expected %d: ranks run different builds", int64_t{header.version},
                   int64_t{kVersion});
  }
  if (header.kind < static_cast<uint32_t>(StepKind::kRun) ||
      header.kind > static_cast<uint32_t>(StepKind::kHeartbeat) || header.reserved != 0) {
    return BadPlan("unknown kind %d", int64_t{header.kind});
  }
  int64_t max_counts[kNumSections];
  MaxCounts(limits, max_counts);
  int64_t expected_bytes = sizeof(PlanHeader);
  absl::Status status;
  const StepPlanView types;
  VisitSections(types, [&](int section, const char* name, const auto& field) {
    const int64_t count = header.counts[section];
    if (count > max_counts[section] && status.ok()) {
      status =
          BadPlan("%d entries in %s, at most %d are allowed", count, name, max_counts[section]);
    }
    // At most 2^32 entries of some 100 bytes in each section: no overflow.
    expected_bytes += PaddedBytes(count * static_cast<int64_t>(sizeof(field[0])));
  });
  LOCKSTEP_RETURN_IF_ERROR(status);
  if (header.total_bytes != static_cast<uint64_t>(expected_bytes)) {
    return BadPlan("length %d, but its sections take %d bytes", header.total_bytes, expected_bytes);
  }
  return absl::OkStatus();
}

bool InRange(int64_t value, int64_t begin, int64_t end) { return value >= begin && value < end; }

// Slots a request names at most once. Bounded by max_num_seqs, so a quadratic check would cost;
// a stack bitmap serves any limit in pieces of its size.
absl::Status CheckDistinctSlots(const char* name, std::span<const int32_t> slots,
                                const PlanLimits& limits) {
  constexpr int64_t kBits = 4096;
  for (int64_t base = 0; base < limits.max_num_seqs; base += kBits) {
    uint64_t seen[kBits / 64] = {};
    for (size_t i = 0; i < slots.size(); ++i) {
      if (!InRange(slots[i], 0, limits.max_num_seqs)) {
        return BadPlan("%s[%d] is slot %d of %d", name, i, slots[i], limits.max_num_seqs);
      }
      const int64_t bit = slots[i] - base;
      if (!InRange(bit, 0, kBits)) continue;
      if (seen[bit / 64] >> (bit % 64) & 1) {
        return BadPlan("%s names slot %d twice", name, slots[i]);
      }
      seen[bit / 64] |= uint64_t{1} << (bit % 64);
    }
  }
  return absl::OkStatus();
}

absl::Status CheckNewRequest(const PlanNewRequest& r, const PlanLimits& limits, size_t i) {
  if (!InRange(r.slot, 0, limits.max_num_seqs)) {
    return BadPlan("new_requests[%d] is in slot %d of %d", i, r.slot, limits.max_num_seqs);
  }
  if (!InRange(r.prompt_length, 1, limits.max_model_len + 1) ||
      !InRange(r.num_computed, 0, limits.max_model_len) ||
      !InRange(r.num_history, 0, limits.max_model_len + 1)) {
    return BadPlan(
        "new_requests[%d] has a prompt of %d tokens, %d computed, %d told; the limit is %d", i,
        r.prompt_length, r.num_computed, r.num_history, limits.max_model_len);
  }
  if (!(r.temperature >= 0) || !std::isfinite(r.temperature) || !(r.top_p > 0) || !(r.top_p <= 1) ||
      !(r.min_p >= 0) || !(r.min_p <= 1) || r.top_k < 0) {
    return BadPlan("new_requests[%d] has temperature %g, top_p %g, min_p %g, top_k %d", i,
                   r.temperature, r.top_p, r.min_p, r.top_k);
  }
  if (!(r.repetition_penalty > 0) || !std::isfinite(r.repetition_penalty) ||
      !std::isfinite(r.frequency_penalty) || !std::isfinite(r.presence_penalty)) {
    return BadPlan("new_requests[%d] has penalties %g, %g, %g", i, r.repetition_penalty,
                   r.frequency_penalty, r.presence_penalty);
  }
  if (!InRange(r.num_logprobs, -1, kMaxLogprobs + 1) ||
      !InRange(r.num_prompt_logprobs, -1, kMaxLogprobs + 1) || r.num_bias < 0 || r.num_banned < 0 ||
      r.banned_below < 0) {
    return BadPlan(
        "new_requests[%d] wants %d and %d logprobs, has %d biases, %d ids banned below %d", i,
        r.num_logprobs, r.num_prompt_logprobs, r.num_bias, r.num_banned, r.banned_below);
  }
  return absl::OkStatus();
}

absl::Status CheckTokens(const char* name, std::span<const int32_t> ids, int32_t lowest,
                         const PlanLimits& limits) {
  for (size_t i = 0; i < ids.size(); ++i) {
    if (!InRange(ids[i], lowest, limits.vocab_size)) {
      return BadPlan("%s[%d] is %d, the vocabulary has %d", name, i, ids[i], limits.vocab_size);
    }
  }
  return absl::OkStatus();
}

absl::Status CheckBlocks(const char* name, std::span<const int32_t> blocks,
                         const PlanLimits& limits) {
  for (size_t i = 0; i < blocks.size(); ++i) {
    if (!InRange(blocks[i], 0, limits.num_blocks)) {
      return BadPlan("%s[%d] is %d of %d", name, i, blocks[i], limits.num_blocks);
    }
  }
  return absl::OkStatus();
}

absl::Status CheckNewRequests(const StepPlanView& plan, const PlanLimits& limits) {
  int64_t num_history = 0;
  int64_t num_bias = 0;
  int64_t num_banned = 0;
  for (size_t i = 0; i < plan.new_requests.size(); ++i) {
    const PlanNewRequest& request = plan.new_requests[i];
    LOCKSTEP_RETURN_IF_ERROR(CheckNewRequest(request, limits, i));
    num_history += request.num_history;
    num_bias += request.num_bias;
    num_banned += request.num_banned;
  }
  if (num_history != std::ssize(plan.history) || num_bias != std::ssize(plan.logit_bias) ||
      num_banned != std::ssize(plan.banned_ids)) {
    return BadPlan(
        "new_requests name %d, %d, %d entries of history, logit_bias, banned_ids; there are %d, "
        "%d, %d",
        num_history, num_bias, num_banned, plan.history.size(), plan.logit_bias.size(),
        plan.banned_ids.size());
  }
  for (size_t i = 0; i < plan.logit_bias.size(); ++i) {
    const LogitBias& bias = plan.logit_bias[i];
    if (!InRange(bias.id, 0, limits.vocab_size) || !std::isfinite(bias.bias)) {
      return BadPlan("logit_bias[%d] adds %g to id %d of %d", i, bias.bias, bias.id,
                     limits.vocab_size);
    }
  }
  LOCKSTEP_RETURN_IF_ERROR(CheckTokens("history", plan.history, 0, limits));
  return CheckTokens("banned_ids", plan.banned_ids, 0, limits);
}

absl::Status CheckBlockChanges(const StepPlanView& plan, const PlanLimits& limits) {
  int64_t num_blocks = 0;
  for (size_t i = 0; i < plan.block_runs.size(); ++i) {
    const PlanBlockRun& run = plan.block_runs[i];
    if (!InRange(run.slot, 0, limits.max_num_seqs) || run.first_index < 0 || run.count < 1 ||
        int64_t{run.first_index} + run.count > limits.max_blocks_per_request()) {
      return BadPlan("block_runs[%d] has slot %d, entries [%d, +%d) of %d", i, run.slot,
                     run.first_index, run.count, limits.max_blocks_per_request());
    }
    num_blocks += run.count;
  }
  if (num_blocks != std::ssize(plan.blocks)) {
    return BadPlan("block_runs name %d blocks, there are %d", num_blocks, plan.blocks.size());
  }
  for (size_t i = 0; i < plan.block_copies.size(); ++i) {
    const PlanBlockCopy& copy = plan.block_copies[i];
    if (!InRange(copy.source, 0, limits.num_blocks) ||
        !InRange(copy.target, 0, limits.num_blocks) || copy.source == copy.target) {
      return BadPlan("block_copies[%d] is from %d to %d of %d", i, copy.source, copy.target,
                     limits.num_blocks);
    }
  }
  LOCKSTEP_RETURN_IF_ERROR(CheckBlocks("blocks", plan.blocks, limits));
  return CheckBlocks("poisoned_blocks", plan.poisoned_blocks, limits);
}

absl::Status CheckChanges(const StepPlanView& plan, const PlanLimits& limits) {
  LOCKSTEP_RETURN_IF_ERROR(CheckDistinctSlots("freed_slots", plan.freed_slots, limits));
  LOCKSTEP_RETURN_IF_ERROR(CheckNewRequests(plan, limits));
  return CheckBlockChanges(plan, limits);
}

// Where a walk over the requests stands in the sections that hold a varying number of entries each.
struct PlanCursor {
  size_t logits_row = 0;
  size_t logprob_target = 0;
};

// Rows of one request: its positions end at seq_len - 1, and the cursor advances over what its
// output asks for.
absl::Status CheckRequest(const StepPlanView& plan, const PlanLimits& limits, int64_t b,
                          PlanCursor& cursor) {
  const int64_t begin = plan.query_start_loc[b];
  const int64_t end = plan.query_start_loc[b + 1];
  const int64_t seq_len = plan.seq_lens[b];
  if (end <= begin || end > plan.num_tokens()) {
    return BadPlan("request %d has rows [%d, %d) of %d", b, begin, end, plan.num_tokens());
  }
  if (!InRange(seq_len, end - begin, limits.max_model_len + 1)) {
    return BadPlan("request %d has seq_len %d with %d new tokens, the limit is %d", b, seq_len,
                   end - begin, limits.max_model_len);
  }
  for (int64_t row = begin; row < end; ++row) {
    if (plan.positions[row] != seq_len - (end - row)) {
      return BadPlan("positions[%d] is %d, expected %d", row, plan.positions[row],
                     seq_len - (end - row));
    }
  }
  const StepOutput output = plan.outputs[b];
  if (output < StepOutput::kNone || output > StepOutput::kPromptLogprobsAndSample) {
    return BadPlan("outputs[%d] is %d", b, static_cast<int32_t>(output));
  }
  if (output == StepOutput::kNone) return absl::OkStatus();
  for (int64_t row = WantsAllLogits(output) ? begin : end - 1; row < end; ++row) {
    if (cursor.logits_row >= plan.logits_rows.size() ||
        plan.logits_rows[cursor.logits_row] != row) {
      return BadPlan("logits_rows lacks row %d of request %d", row, b);
    }
    ++cursor.logits_row;
  }
  if (WantsPromptLogprobs(output)) cursor.logprob_target += static_cast<size_t>(end - begin);
  return absl::OkStatus();
}

absl::Status CheckBatch(const StepPlanView& plan, const PlanLimits& limits) {
  const size_t num_tokens = plan.token_ids.size();
  const size_t num_requests = plan.request_slots.size();
  if (num_tokens == 0 || num_requests == 0) return BadPlan("a run step without tokens");
  if (plan.slot_mapping.size() != num_tokens || plan.positions.size() != num_tokens ||
      plan.outputs.size() != num_requests || plan.seq_lens.size() != num_requests ||
      plan.query_start_loc.size() != num_requests + 1) {
    return BadPlan("counts of the sections disagree (%d tokens, %d requests)", num_tokens,
                   num_requests);
  }
  LOCKSTEP_RETURN_IF_ERROR(CheckDistinctSlots("request_slots", plan.request_slots, limits));
  const int64_t num_slots = limits.num_blocks * limits.block_size;
  LOCKSTEP_RETURN_IF_ERROR(CheckTokens("token_ids", plan.token_ids, kLastSampledToken, limits));
  LOCKSTEP_RETURN_IF_ERROR(CheckTokens("logprob_targets", plan.logprob_targets, -1, limits));
  for (size_t t = 0; t < num_tokens; ++t) {
    if (!InRange(plan.slot_mapping[t], 0, num_slots)) {
      return BadPlan("slot_mapping[%d] is %d of %d", t, plan.slot_mapping[t], num_slots);
    }
  }
  if (plan.query_start_loc.front() != 0 ||
      plan.query_start_loc.back() != static_cast<int64_t>(num_tokens)) {
    return BadPlan("query_start_loc runs from %d to %d, there are %d tokens",
                   plan.query_start_loc.front(), plan.query_start_loc.back(), num_tokens);
  }
  PlanCursor cursor;
  for (size_t b = 0; b < num_requests; ++b) {
    LOCKSTEP_RETURN_IF_ERROR(CheckRequest(plan, limits, static_cast<int64_t>(b), cursor));
  }
  if (cursor.logits_row != plan.logits_rows.size() ||
      cursor.logprob_target != plan.logprob_targets.size()) {
    return BadPlan("%d logits_rows and %d logprob_targets, the requests ask for %d and %d",
                   plan.logits_rows.size(), plan.logprob_targets.size(), cursor.logits_row,
                   cursor.logprob_target);
  }
  return absl::OkStatus();
}

}  // namespace

void StepPlan::Clear() {
  step = 0;
  kind = StepKind::kRun;
  VisitSections(*this, [](int, const char*, auto& field) { field.clear(); });
}

int64_t EncodedBytes(const StepPlan& plan) {
  int64_t bytes = sizeof(PlanHeader);
  VisitSections(plan, [&](int, const char*, const auto& field) {
    bytes += PaddedBytes(static_cast<int64_t>(field.size() * sizeof(field[0])));
  });
  return bytes;
}

int64_t EncodePlan(const StepPlan& plan, PlanBuffer& buffer) {
  PlanHeader header;
  header.total_bytes = static_cast<uint64_t>(EncodedBytes(plan));
  header.step = plan.step;
  header.kind = static_cast<uint32_t>(plan.kind);
  buffer.Reserve(static_cast<int64_t>(header.total_bytes));
  std::byte* out = buffer.data() + sizeof(PlanHeader);
  VisitSections(plan, [&](int section, const char*, const auto& field) {
    header.counts[section] = static_cast<uint32_t>(field.size());
    const int64_t bytes = static_cast<int64_t>(field.size() * sizeof(field[0]));
    const int64_t padding = PaddedBytes(bytes) - bytes;
    if (bytes > 0) std::memcpy(out, field.data(), static_cast<size_t>(bytes));
    std::memset(out + bytes, 0, static_cast<size_t>(padding));
    out += bytes + padding;
  });
  std::memcpy(buffer.data(), &header, sizeof(header));
  return static_cast<int64_t>(header.total_bytes);
}

absl::StatusOr<StepPlanView> DecodePlan(std::span<const std::byte> bytes,
                                        const PlanLimits& limits) {
  if (reinterpret_cast<uintptr_t>(bytes.data()) % 8 != 0) return BadPlan("buffer is not aligned");
  PlanHeader header;
  if (bytes.size() < sizeof(header)) return BadPlan("%d bytes are no header", bytes.size());
  std::memcpy(&header, bytes.data(), sizeof(header));
  LOCKSTEP_RETURN_IF_ERROR(CheckHeader(header, limits));
  if (header.total_bytes > bytes.size()) {
    return BadPlan("cut off: %d of %d bytes", bytes.size(), header.total_bytes);
  }
  StepPlanView plan;
  plan.step = header.step;
  plan.kind = static_cast<StepKind>(header.kind);
  const std::byte* in = bytes.data() + sizeof(header);
  VisitSections(plan, [&]<typename T>(int section, const char*, std::span<const T>& field) {
    field = {reinterpret_cast<const T*>(in), header.counts[section]};
    in += PaddedBytes(static_cast<int64_t>(field.size_bytes()));
  });
  if (plan.kind == StepKind::kRun) {
    LOCKSTEP_RETURN_IF_ERROR(CheckChanges(plan, limits));
    LOCKSTEP_RETURN_IF_ERROR(CheckBatch(plan, limits));
  } else if (header.total_bytes != sizeof(header)) {
    return BadPlan("a stop or heartbeat with content");
  }
  return plan;
}

absl::Status BroadcastPlan(Communicator& communicator, const StepPlan& plan, PlanBuffer& buffer) {
  if (communicator.size() == 1) return absl::OkStatus();
  const int64_t total_bytes = EncodePlan(plan, buffer);
  LOCKSTEP_RETURN_IF_ERROR(communicator.Broadcast(buffer.data(), kPlanFirstPartBytes, 0));
  if (total_bytes <= kPlanFirstPartBytes) return absl::OkStatus();
  return communicator.Broadcast(buffer.data() + kPlanFirstPartBytes,
                                total_bytes - kPlanFirstPartBytes, 0);
}

absl::StatusOr<StepPlanView> ReceivePlan(Communicator& communicator, const PlanLimits& limits,
                                         PlanBuffer& buffer) {
  LOCKSTEP_RETURN_IF_ERROR(communicator.Broadcast(buffer.data(), kPlanFirstPartBytes, 0));
  PlanHeader header;
  std::memcpy(&header, buffer.data(), sizeof(header));
  // Before the length is believed: the limits bound what is allocated.
  LOCKSTEP_RETURN_IF_ERROR(CheckHeader(header, limits));
  const int64_t total_bytes = static_cast<int64_t>(header.total_bytes);
  if (total_bytes > kPlanFirstPartBytes) {
    buffer.Reserve(total_bytes);
    LOCKSTEP_RETURN_IF_ERROR(communicator.Broadcast(buffer.data() + kPlanFirstPartBytes,
                                                    total_bytes - kPlanFirstPartBytes, 0));
  }
  return DecodePlan({buffer.data(), static_cast<size_t>(total_bytes)}, limits);
}

StepPlanView View(const StepPlan& plan) {
  StepPlanView view;
  view.step = plan.step;
  view.kind = plan.kind;
  view.freed_slots = plan.freed_slots;
  view.new_requests = plan.new_requests;
  view.history = plan.history;
  view.logit_bias = plan.logit_bias;
  view.banned_ids = plan.banned_ids;
  view.block_runs = plan.block_runs;
  view.blocks = plan.blocks;
  view.poisoned_blocks = plan.poisoned_blocks;
  view.block_copies = plan.block_copies;
  view.slot_mapping = plan.slot_mapping;
  view.token_ids = plan.token_ids;
  view.positions = plan.positions;
  view.request_slots = plan.request_slots;
  view.outputs = plan.outputs;
  view.seq_lens = plan.seq_lens;
  view.query_start_loc = plan.query_start_loc;
  view.logits_rows = plan.logits_rows;
  view.logprob_targets = plan.logprob_targets;
  return view;
}

}  // namespace lockstep
