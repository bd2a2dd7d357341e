// Changes block tables on the device.
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

}  // namespace lockstep
