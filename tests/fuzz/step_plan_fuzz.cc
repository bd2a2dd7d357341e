// Any bytes as a sequence of step plans under any small limits. A plan that is accepted must encode
// to the same plan again, and the batch state must take it or refuse it.
#include <cstddef>
#include <cstring>
#include <random>
#include <span>
#include <type_traits>
#include <vector>

#include "runtime/batch_state.h"
#include "runtime/step_plan.h"
#include "tests/fuzz/plan_sequence.h"

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

namespace lockstep {
namespace {

// Calls visit(a's field, b's field) for every field of two plans.
template <typename A, typename B, typename Visit>
void VisitFields(A& a, B& b, Visit visit) {
  visit(a.freed_slots, b.freed_slots);
  visit(a.new_requests, b.new_requests);
  visit(a.history, b.history);
  visit(a.logit_bias, b.logit_bias);
  visit(a.banned_ids, b.banned_ids);
  visit(a.block_runs, b.block_runs);
  visit(a.blocks, b.blocks);
  visit(a.poisoned_blocks, b.poisoned_blocks);
  visit(a.block_copies, b.block_copies);
  visit(a.slot_mapping, b.slot_mapping);
  visit(a.token_ids, b.token_ids);
  visit(a.positions, b.positions);
  visit(a.request_slots, b.request_slots);
  visit(a.outputs, b.outputs);
  visit(a.seq_lens, b.seq_lens);
  visit(a.query_start_loc, b.query_start_loc);
  visit(a.logits_rows, b.logits_rows);
  visit(a.logprob_targets, b.logprob_targets);
}

StepPlan Copy(const StepPlanView& view) {
  StepPlan plan;
  plan.step = view.step;
  plan.kind = view.kind;
  VisitFields(plan, view, [](auto& to, const auto& from) { to.assign(from.begin(), from.end()); });
  return plan;
}

// `bytes` is the accepted plan's length; a field that VisitFields forgets changes it.
void CheckRoundTrip(const StepPlanView& view, size_t bytes, const PlanLimits& limits) {
  const StepPlan plan = Copy(view);
  PlanBuffer buffer;
  LOCKSTEP_CHECK(EncodePlan(plan, buffer) == static_cast<int64_t>(bytes));
  const auto again = DecodePlan({buffer.data(), bytes}, limits);
  LOCKSTEP_CHECK(again.ok() && again->step == view.step && again->kind == view.kind);
  VisitFields(*again, view, [](const auto& x, const auto& y) {
    LOCKSTEP_CHECK(x.size() == y.size() &&
                   (x.empty() || std::memcmp(x.data(), y.data(), x.size_bytes()) == 0));
  });
}

// What the model and the sampler read of a batch, so that a span that leaves its memory is seen.
void UseBatch(const BatchState& state, const PlanLimits& limits, Range vocab) {
  const ForwardBatch& batch = state.forward_batch();
  for (const int32_t id : batch.token_ids) LOCKSTEP_CHECK(id >= 0 && id < limits.vocab_size);
  for (const int32_t row : batch.logits_rows) {
    LOCKSTEP_CHECK(row >= 0 && row < batch.num_tokens());
  }
  const AttentionBatch& attention = batch.attention;
  for (int64_t b = 0; b < attention.num_requests(); ++b) {
    const int64_t tokens = attention.seq_lens[b];
    LOCKSTEP_CHECK(tokens >= attention.query_start_loc[b + 1] - attention.query_start_loc[b]);
    for (int64_t i = 0; i * limits.block_size < tokens; ++i) {
      const int32_t block = attention.block_tables[b * attention.max_blocks + i];
      LOCKSTEP_CHECK(block >= 0 && block < limits.num_blocks);
    }
  }
  const int64_t num_slots = limits.num_blocks * limits.block_size;
  for (const int64_t slot : attention.slot_mapping) LOCKSTEP_CHECK(slot >= 0 && slot < num_slots);
  const auto num_logits_rows = static_cast<int64_t>(batch.logits_rows.size());
  std::vector<float> logits(static_cast<size_t>(vocab.size()), 1.5f);
  for (const SampleRow& row : state.sample_rows()) {
    LOCKSTEP_CHECK(row.logits_row >= 0 && row.logits_row < num_logits_rows);
    if (row.adjuster != nullptr) row.adjuster->Apply(row.position, logits.data());
  }
  for (const LogprobRow& row : state.logprob_rows()) {
    LOCKSTEP_CHECK(row.logits_row >= 0 && row.logits_row < num_logits_rows);
    LOCKSTEP_CHECK(row.token >= 0 && row.token < limits.vocab_size);
  }
}

// A copy in memory of its own, so that a byte too much is seen.
std::vector<uint64_t> Aligned(std::span<const uint8_t> input) {
  std::vector<uint64_t> words((input.size() + 7) / 8);
  if (!input.empty()) std::memcpy(words.data(), input.data(), input.size());
  return words;
}

// Decodes, checks and applies the plan; false where the job would have ended.
bool RunPlan(std::span<const uint8_t> input, const PlanLimits& limits, Range vocab,
             BatchState& state) {
  const std::vector<uint64_t> words = Aligned(input);
  const auto view =
      DecodePlan({reinterpret_cast<const std::byte*>(words.data()), input.size()}, limits);
  if (!view.ok()) return false;
  CheckRoundTrip(*view, input.size(), limits);
  if (view->kind != StepKind::kRun) return view->kind == StepKind::kHeartbeat;
  if (!state.Apply(*view).ok()) return false;
  UseBatch(state, limits, vocab);
  std::vector<int32_t> sampled(state.sample_rows().size());
  for (size_t i = 0; i < sampled.size(); ++i) {
    sampled[i] = static_cast<int32_t>((view->step + i) % static_cast<uint64_t>(limits.vocab_size));
  }
  state.Accept(sampled);
  return true;
}

void RunPlans(std::span<const uint8_t> input) {
  if (input.size() < kLimitsBytes) return;
  const PlanLimits limits = LimitsFromBytes(input.data());
  input = input.subspan(kLimitsBytes);
  const Range vocab = {limits.vocab_size / 3, limits.vocab_size};  // of rank 1 of 2, say
  BatchState state(limits, vocab);
  while (!input.empty()) {
    const size_t bytes = ClaimedBytes(input);
    if (!RunPlan(input.first(bytes), limits, vocab, state)) return;
    input = input.subspan(bytes);
  }
}

// One entry more or less, or one with other bytes, somewhere in the plan.
void ChangeEntry(StepPlan& plan, std::minstd_rand& random) {
  constexpr unsigned kNumFields = 18;
  unsigned field = random() % kNumFields;
  VisitFields(plan, plan, [&](auto& entries, auto&) {
    if (field-- != 0) return;
    const size_t at = entries.empty() ? 0 : random() % entries.size();
    switch (entries.empty() ? 0 : random() % 4) {
      case 0:
        entries.insert(entries.begin() + static_cast<std::ptrdiff_t>(at),
                       entries.empty() ? std::decay_t<decltype(entries[0])>() : entries[at]);
        return;
      case 1:
        entries.erase(entries.begin() + static_cast<std::ptrdiff_t>(at));
        return;
      default:
        auto* bytes = reinterpret_cast<uint8_t*>(&entries[at]);
        LLVMFuzzerMutate(bytes, sizeof(entries[at]), sizeof(entries[at]));
    }
  });
}

// Changes one of the plans that decode, and leaves its header right. 0 when none does.
size_t MutatePlan(uint8_t* data, size_t size, size_t max_size, std::minstd_rand& random) {
  if (size < kLimitsBytes) return 0;
  const PlanLimits limits = LimitsFromBytes(data);
  size_t begin = kLimitsBytes;
  while (begin < size) {
    const size_t bytes = ClaimedBytes({data + begin, size - begin});
    const std::vector<uint64_t> words = Aligned({data + begin, bytes});
    const auto view = DecodePlan({reinterpret_cast<const std::byte*>(words.data()), bytes}, limits);
    if (!view.ok()) return 0;
    if (random() % 2 == 0 || begin + bytes == size) {
      StepPlan plan = Copy(*view);
      ChangeEntry(plan, random);
      PlanBuffer buffer;
      const auto changed = static_cast<size_t>(EncodePlan(plan, buffer));
      if (size - bytes + changed > max_size) return 0;
      std::memmove(data + begin + changed, data + begin + bytes, size - begin - bytes);
      std::memcpy(data + begin, buffer.data(), changed);
      return size - bytes + changed;
    }
    begin += bytes;
  }
  return 0;
}

}  // namespace
}  // namespace lockstep

// Bytes changed blindly seldom leave a header that fits its sections: half of the changes are made
// to decoded plans.
extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size,
                                          unsigned int seed) {
  std::minstd_rand random(seed);
  if (random() % 2 == 0) {
    if (const size_t mutated = lockstep::MutatePlan(data, size, max_size, random); mutated > 0) {
      return mutated;
    }
  }
  return LLVMFuzzerMutate(data, size, max_size);
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  lockstep::RunPlans({data, size});
  return 0;
}
