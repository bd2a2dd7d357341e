// What crosses from the engine to the model each step: plain spans, filled by runtime/ from the
// StepPlan, valid for the step.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "attention/attention_batch.h"

namespace lockstep {

// Entries [first_index, first_index + count) of the block table in row `slot`.
struct BlockTableRun {
  int32_t slot = 0;
  int32_t first_index = 0;
  int32_t count = 0;
};

// What is new in attention.block_tables since the last step: the runs' entries, one after the
// other. For devices that keep tables of their own.
struct BlockTableChanges {
  std::span<const BlockTableRun> runs;
  std::span<const int32_t> blocks;
};

struct ForwardBatch {
  std::span<const int32_t> token_ids;  // [T]; negative for a DeviceDecoder alone, see there
  std::span<const int32_t> positions;  // [T]
  // [T] length that sets the base of dynamic RoPE for the token: max(prompt length of its request,
  // position + 1).
  std::span<const int32_t> rope_lengths;
  std::span<const int32_t> logits_rows;  // [R] rows of [0, T) whose logits are wanted
  AttentionBatch attention;
  std::optional<BlockTableChanges> table_changes;  // none: anything may be new

  int64_t num_tokens() const { return static_cast<int64_t>(token_ids.size()); }
};

}  // namespace lockstep
