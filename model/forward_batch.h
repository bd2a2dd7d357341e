// What crosses from the engine to the model each step: plain spans, filled by runtime/ from the
// StepPlan, valid for the step.
#pragma once

#include <cstdint>
#include <span>

#include "attention/attention_batch.h"

namespace lockstep {

struct ForwardBatch {
  std::span<const int32_t> token_ids;  // [T]
  std::span<const int32_t> positions;  // [T]
  // [T] length that sets the base of dynamic RoPE for the token: max(prompt length of its request,
  // position + 1).
  std::span<const int32_t> rope_lengths;
  std::span<const int32_t> logits_rows;  // [R] rows of [0, T) whose logits are wanted
  AttentionBatch attention;

  int64_t num_tokens() const { return static_cast<int64_t>(token_ids.size()); }
};

}  // namespace lockstep
