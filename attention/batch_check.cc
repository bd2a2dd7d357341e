#include "attention/batch_check.h"

#include <algorithm>

namespace lockstep {
namespace {

absl::Status CheckTableRows(const AttentionBatch& batch) {
  if (batch.max_blocks < 0) {
    return absl::InvalidArgumentError(
        absl::StrFormat("attention batch: block tables of %d blocks", batch.max_blocks));
  }
  if (batch.table_rows.empty()) return absl::OkStatus();
  if (std::ssize(batch.table_rows) != batch.num_requests()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("attention batch: table_rows has %d entries for %d requests",
                        batch.table_rows.size(), batch.num_requests()));
  }
  for (int64_t b = 0; b < batch.num_requests(); ++b) {
    const int64_t row = batch.table_rows[b];
    if (row >= 0 && (row + 1) * batch.max_blocks <= std::ssize(batch.block_tables)) continue;
    return absl::InvalidArgumentError(absl::StrFormat(
        "attention batch: request %d's block table is row %d of %d entries in rows of %d", b, row,
        batch.block_tables.size(), batch.max_blocks));
  }
  return absl::OkStatus();
}

absl::Status CheckSizes(const AttentionBatch& batch, int64_t block_size) {
  const int64_t requests = batch.num_requests();
  if (block_size < 1) {
    return absl::InvalidArgumentError(
        absl::StrFormat("attention: block size %d is below 1", block_size));
  }
  if (static_cast<int64_t>(batch.query_start_loc.size()) != requests + 1) {
    return absl::InvalidArgumentError(
        absl::StrFormat("attention batch: query_start_loc has %d entries for %d requests, not %d",
                        batch.query_start_loc.size(), requests, requests + 1));
  }
  LOCKSTEP_RETURN_IF_ERROR(CheckTableRows(batch));
  if (batch.table_rows.empty() && std::ssize(batch.block_tables) != requests * batch.max_blocks) {
    return absl::InvalidArgumentError(
        absl::StrFormat("attention batch: block_tables has %d entries for %d requests of %d blocks",
                        batch.block_tables.size(), requests, batch.max_blocks));
  }
  if (batch.query_start_loc[0] != 0) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "attention batch: query_start_loc starts with %d, not 0", batch.query_start_loc[0]));
  }
  return absl::OkStatus();
}

absl::Status CheckRequest(const AttentionBatch& batch, int64_t block_size, int64_t b) {
  const int64_t first = batch.query_start_loc[b];
  const int64_t last = batch.query_start_loc[b + 1];
  if (last < first) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "attention batch: query_start_loc falls from %d to %d at request %d", first, last, b));
  }
  if (batch.seq_lens[b] < last - first) {
    return absl::InvalidArgumentError(
        absl::StrFormat("attention batch: request %d has %d new tokens and a length of only %d", b,
                        last - first, batch.seq_lens[b]));
  }
  const int64_t blocks = (int64_t{batch.seq_lens[b]} + block_size - 1) / block_size;
  if (blocks > batch.max_blocks) {
    return absl::InvalidArgumentError(
        absl::StrFormat("attention batch: request %d has %d tokens, which need %d blocks of %d; "
                        "its block table has %d",
                        b, batch.seq_lens[b], blocks, block_size, batch.max_blocks));
  }
  for (int64_t i = 0; i < blocks; ++i) {
    const int32_t block = batch.BlockTable(b)[i];
    if (block < 0) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "attention batch: entry %d of request %d's block table is %d", i, b, block));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckBatch(const AttentionBatch& batch, int64_t block_size) {
  LOCKSTEP_RETURN_IF_ERROR(CheckSizes(batch, block_size));
  for (int64_t b = 0; b < batch.num_requests(); ++b) {
    LOCKSTEP_RETURN_IF_ERROR(CheckRequest(batch, block_size, b));
  }
  const int64_t num_rows = batch.query_start_loc.back();
  if (num_rows > batch.num_tokens()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("attention batch: query_start_loc ends at %d and there are %d tokens",
                        num_rows, batch.num_tokens()));
  }
  for (int64_t t = 0; t < batch.num_tokens(); ++t) {
    const int64_t slot = batch.slot_mapping[t];
    if (slot < kNoSlot || (t >= num_rows && slot != kNoSlot)) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "attention batch: slot %d of %s row %d", slot, t >= num_rows ? "padding" : "token", t));
    }
  }
  return absl::OkStatus();
}

int32_t LargestBlock(const AttentionBatch& batch, int64_t block_size) {
  int32_t largest = -1;
  for (int64_t b = 0; b < batch.num_requests(); ++b) {
    const int64_t blocks = (int64_t{batch.seq_lens[b]} + block_size - 1) / block_size;
    const int32_t* table = batch.BlockTable(b);
    if (blocks > 0) largest = std::max(largest, *std::max_element(table, table + blocks));
  }
  return largest;
}

void CheckForwardArguments(const AttentionGeometry& geometry, const MatrixView& query,
                           const KvCacheView& cache, const MatrixView& out, int64_t num_tokens) {
  const int64_t width = geometry.num_query_heads * geometry.head_dim;
  LOCKSTEP_CHECK(query.dtype == DType::kF32 && out.dtype == DType::kF32);
  LOCKSTEP_CHECK(query.rows == num_tokens && query.cols == width && query.stride >= width);
  LOCKSTEP_CHECK(out.rows == num_tokens && out.cols == width && out.stride >= width);
  LOCKSTEP_CHECK(cache.num_kv_heads == geometry.num_kv_heads);
  LOCKSTEP_CHECK(cache.head_dim == geometry.head_dim);
  LOCKSTEP_CHECK(static_cast<int64_t>(geometry.kv_groups.size()) == geometry.num_kv_heads);
  int64_t next_head = 0;
  for (const Range& group : geometry.kv_groups) {
    LOCKSTEP_CHECK(group.begin == next_head && group.end >= group.begin);
    next_head = group.end;
  }
  LOCKSTEP_CHECK(next_head == geometry.num_query_heads);
}

void CheckWriteArguments(const MatrixView& keys, const MatrixView& values,
                         std::span<const int64_t> slots, const KvCacheView& cache) {
  const int64_t width = cache.num_kv_heads * cache.head_dim;
  const int64_t num_slots = cache.num_blocks * cache.block_size;
  LOCKSTEP_CHECK(keys.dtype == DType::kF32 && values.dtype == DType::kF32);
  LOCKSTEP_CHECK(keys.rows == static_cast<int64_t>(slots.size()) && keys.cols == width);
  LOCKSTEP_CHECK(values.rows == static_cast<int64_t>(slots.size()) && values.cols == width);
  for (int64_t slot : slots) LOCKSTEP_CHECK(slot >= kNoSlot && slot < num_slots);
}

}  // namespace lockstep
