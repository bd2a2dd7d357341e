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

// token_ids [count] below 0, -1 - s, become last_tokens[s]. Device memory.
absl::Status PutLastTokens(const int32_t* last_tokens, int32_t* token_ids, int64_t count,
                           CudaStream stream);

}  // namespace lockstep
