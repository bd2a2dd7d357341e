// One step's batch as attention sees it. Plain spans over memory that outlives the step; no
// knowledge of models or ranks.
#pragma once

#include <cstdint>
#include <span>

namespace lockstep {

// T packed tokens of B requests; request b's new tokens are rows [query_start_loc[b],
// query_start_loc[b+1]), and are the last of its seq_lens[b] tokens: row i of request b has
// position seq_lens[b] - (query_start_loc[b+1] - i). Its key at position p is in block
// BlockTable(b)[p / P], offset p % P. Rows from query_start_loc[B] on are padding.
struct AttentionBatch {
  std::span<const int32_t> query_start_loc;  // [B + 1], starts with 0
  std::span<const int32_t> seq_lens;         // [B], tokens visible after this step's writes
  // [tables, max_blocks]: request b's is row table_rows[b], or row b where table_rows is empty. So
  // the tables may stay where they are from step to step.
  std::span<const int32_t> block_tables;
  int64_t max_blocks = 0;
  std::span<const int64_t> slot_mapping;     // [T], kNoSlot for padding
  std::span<const int32_t> table_rows = {};  // [B], or empty

  const int32_t* BlockTable(int64_t b) const {
    return block_tables.data() + (table_rows.empty() ? b : table_rows[b]) * max_blocks;
  }
  int64_t num_requests() const { return static_cast<int64_t>(seq_lens.size()); }
  int64_t num_tokens() const { return static_cast<int64_t>(slot_mapping.size()); }
};

}  // namespace lockstep
