// What rank 0 tells the other ranks about one step: everything that must be alike on all of them.
//
// On the wire a plan is one contiguous buffer, 8-byte aligned, little-endian: a header (magic,
// version, total length, one count a section), then the sections in the order of the fields below,
// each padded to 8 bytes. The first kPlanFirstPartBytes always travel; the rest follows in a second
// broadcast only when there is more.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "cache/block_allocator.h"
#include "model/forward_batch.h"
#include "parallel/communicator.h"
#include "runtime/logit_adjuster.h"

namespace lockstep {

enum class StepKind : uint32_t {
  kRun = 1,        // a forward pass
  kStop = 2,       // leave Follow
  kHeartbeat = 3,  // nothing to do; rank 0 is alive
};

// What a step makes of a request's rows.
enum class StepOutput : int32_t {
  kNone = 0,            // a prefill chunk that does not end the prompt
  kSample = 1,          // the next token from the last row
  kScore = 2,           // the full logits of all rows, to rank 0
  kPromptLogprobs = 3,  // of the prompt's tokens that follow the rows
  kPromptLogprobsAndSample = 4,
};

inline bool Samples(StepOutput output) {
  return output == StepOutput::kSample || output == StepOutput::kPromptLogprobsAndSample;
}
inline bool WantsPromptLogprobs(StepOutput output) {
  return output == StepOutput::kPromptLogprobs || output == StepOutput::kPromptLogprobsAndSample;
}
// Every row's logits, not the last row's alone.
inline bool WantsAllLogits(StepOutput output) {
  return output == StepOutput::kScore || WantsPromptLogprobs(output);
}

// Stands in token_ids for the token that the last sampling of the request's slot gave: rank 0 may
// plan a step before it knows the tokens of the one before.
inline constexpr int32_t kLastSampledToken = -1;

// A request takes a free slot of the batch state: for the first time, or again after it was
// preempted. Sampling parameters as in SamplingParams.
struct PlanNewRequest {
  uint64_t seed = 0;
  double temperature = 0;
  double top_p = 1;
  double min_p = 0;
  double repetition_penalty = 1;
  double frequency_penalty = 0;
  double presence_penalty = 0;
  int64_t top_k = 0;
  int32_t slot = 0;
  int32_t prompt_length = 0;
  int32_t num_computed = 0;   // tokens whose K and V are in the request's blocks already
  int32_t banned_below = 0;   // position from which on the banned ids may be picked
  int32_t num_logprobs = -1;  // -1: none
  int32_t num_prompt_logprobs = -1;
  // Of the sections of these names, the next so many belong to this request.
  int32_t num_history = 0;  // its tokens so far, when a penalty needs them
  int32_t num_bias = 0;
  int32_t num_banned = 0;
  int32_t unused = 0;
};

// Before the step, the K and V of `source` are copied to `target`, in all layers.
struct PlanBlockCopy {
  int32_t source = 0;
  int32_t target = 0;
};

// Entries [first_index, first_index + count) of the block table of `slot`; their blocks are the
// next `count` of StepPlan::blocks.
using PlanBlockRun = BlockTableRun;

// Fields of a plan over a sequence type: vectors where it is made, spans where it was received.
// T tokens, B requests, R rows of logits.
template <template <typename> class Sequence>
struct BasicStepPlan {
  uint64_t step = 0;
  StepKind kind = StepKind::kRun;

  // Changes of the batch state, applied in this order before the step.
  Sequence<int32_t> freed_slots;
  Sequence<PlanNewRequest> new_requests;
  Sequence<int32_t> history;
  Sequence<LogitBias> logit_bias;
  Sequence<int32_t> banned_ids;
  Sequence<PlanBlockRun> block_runs;
  Sequence<int32_t> blocks;
  Sequence<int32_t> poisoned_blocks;  // freed, to be filled with NaN (a debugging aid)
  Sequence<PlanBlockCopy> block_copies;

  // The packed batch.
  Sequence<int64_t> slot_mapping;     // [T]
  Sequence<int32_t> token_ids;        // [T], may be kLastSampledToken
  Sequence<int32_t> positions;        // [T]
  Sequence<int32_t> request_slots;    // [B]
  Sequence<StepOutput> outputs;       // [B]
  Sequence<int32_t> seq_lens;         // [B]
  Sequence<int32_t> query_start_loc;  // [B + 1]
  Sequence<int32_t> logits_rows;      // [R], ascending: what `outputs` asks for
  // For each row of requests that want prompt logprobs: the prompt's token that follows it; -1
  // for the prompt's last row, which has none.
  Sequence<int32_t> logprob_targets;

  int64_t num_tokens() const { return static_cast<int64_t>(token_ids.size()); }
  int64_t num_requests() const { return static_cast<int64_t>(request_slots.size()); }
};

template <typename T>
using PlanVector = std::vector<T>;
template <typename T>
using PlanSpan = std::span<const T>;

// A plan under construction. Clear keeps the memory, so a steady decode loop allocates nothing.
struct StepPlan : BasicStepPlan<PlanVector> {
  void Clear();
};
// A plan in someone's buffer.
using StepPlanView = BasicStepPlan<PlanSpan>;

// What a plan must respect: the same on all ranks, fixed when the engine is made.
struct PlanLimits {
  int64_t max_num_batched_tokens = 0;
  int64_t max_num_seqs = 0;
  int64_t max_model_len = 0;
  int64_t block_size = 0;
  int64_t num_blocks = 0;
  int64_t vocab_size = 0;
  int64_t max_logits_rows = 0;

  int64_t max_blocks_per_request() const { return (max_model_len + block_size - 1) / block_size; }
};

inline constexpr int64_t kPlanFirstPartBytes = 4096;

// The memory a plan is encoded to and received in. Grows to the largest plan seen.
class PlanBuffer {
 public:
  PlanBuffer() : words_(kPlanFirstPartBytes / 8) {}

  std::byte* data() { return reinterpret_cast<std::byte*>(words_.data()); }
  int64_t capacity_bytes() const { return static_cast<int64_t>(words_.size()) * 8; }
  // Keeps the content.
  void Reserve(int64_t bytes) {
    if (bytes > capacity_bytes()) words_.resize(static_cast<size_t>((bytes + 7) / 8));
  }

 private:
  std::vector<uint64_t> words_;
};

// Length of the encoded plan.
int64_t EncodedBytes(const StepPlan& plan);
// Writes the plan to the buffer and returns its length.
int64_t EncodePlan(const StepPlan& plan, PlanBuffer& buffer);

// The plan in `bytes` (8-byte aligned), which must outlive the view. Bytes may be anything:
// InvalidArgument, naming field and index, for a wrong magic, version, length, or any count, index
// or value outside `limits`, or where fields contradict each other.
absl::StatusOr<StepPlanView> DecodePlan(std::span<const std::byte> bytes, const PlanLimits& limits);

// COLLECTIVE (with ReceivePlan on the other ranks). Rank 0 sends the plan: one broadcast of
// kPlanFirstPartBytes, and a second when the plan is longer.
absl::Status BroadcastPlan(Communicator& communicator, const StepPlan& plan, PlanBuffer& buffer);
// COLLECTIVE. The view points into `buffer` and holds until the buffer's next use.
absl::StatusOr<StepPlanView> ReceivePlan(Communicator& communicator, const PlanLimits& limits,
                                         PlanBuffer& buffer);
// Rank 0's own plan as the other ranks see it.
StepPlanView View(const StepPlan& plan);

}  // namespace lockstep
