// What every backend checks alike before it builds its metadata or runs.
#pragma once

#include <cstdint>

#include "attention/attention_backend.h"
#include "runtime/core/status.h"

namespace lockstep {

// InvalidArgument, naming the request and both numbers, when the batch contradicts itself: sizes of
// the spans, query_start_loc not ascending from 0 or beyond T, more new tokens than seq_len, a
// table too short or with a negative block in the part in use, a slot below kNoSlot, or a padding
// row with a slot.
absl::Status CheckBatch(const AttentionBatch& batch, int64_t block_size);

// The largest block id any request of a checked batch reads; -1 when none.
int32_t LargestBlock(const AttentionBatch& batch, int64_t block_size);

// Ends the process when views, geometry and cache of one call do not fit together: a bug of the
// caller. kv_groups must partition the query heads in order.
void CheckForwardArguments(const AttentionGeometry& geometry, const MatrixView& query,
                           const KvCacheView& cache, const MatrixView& out, int64_t num_tokens);
void CheckWriteArguments(const MatrixView& keys, const MatrixView& values,
                         std::span<const int64_t> slots, const KvCacheView& cache);

}  // namespace lockstep
