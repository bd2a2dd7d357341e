// Changes to a step's arrays and to block tables on the device.
#pragma once

#include <cstdint>

#include "model/forward_batch.h"
#include "runtime/core/cuda_device.h"

namespace lockstep {

// For each run in turn: entries [first_index, first_index + count) of row `slot` of `tables`
// become the next `count` of `blocks`. runs [num_runs], blocks, tables [rows, max_blocks]: device
// memory. No two runs of a call may name the same entry.
absl::Status ApplyTableRuns(const BlockTableRun* runs, int64_t num_runs, const int32_t* blocks,
                            int32_t* tables, int64_t max_blocks, CudaStream stream);

// An array of a step: words of `from`, page-locked host memory that the device reads by itself, to
// device memory.
struct StepArray {
  const int32_t* from = nullptr;
  int32_t* to = nullptr;
  int64_t num_words = 0;
};
// One launch instead of a copy an array, each of which costs more than its few bytes. In the first
// array, a word -1 - s below 0 becomes last_tokens[s].
constexpr int kNumStepArrays = 7;
absl::Status PutStepArrays(const StepArray (&arrays)[kNumStepArrays], const int32_t* last_tokens,
                           CudaStream stream);

}  // namespace lockstep
