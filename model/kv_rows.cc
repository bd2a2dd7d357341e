#include "model/kv_rows.h"

#include <algorithm>

#include "attention/kv_convert.h"
#include "runtime/core/status.h"

namespace lockstep {

namespace {

// Calls visit(stored, scale, row's part) for every token, keys or values, and head.
template <typename Visit>
void ForEachVector(const KvCacheView& cache, std::span<const int64_t> slots, const MatrixView& rows,
                   const Visit& visit) {
  const int64_t cols = cache.num_kv_heads * cache.head_dim;
  LOCKSTEP_CHECK(rows.rows == std::ssize(slots) && rows.cols == 2 * cols);
  LOCKSTEP_CHECK(rows.dtype == DType::kF32);
  for (int64_t t = 0; t < rows.rows; ++t) {
    const int64_t slot = slots[static_cast<size_t>(t)];
    if (slot == kNoSlot) continue;
    LOCKSTEP_CHECK(slot >= 0 && slot / cache.block_size < cache.num_blocks);
    for (int64_t head = 0; head < cache.num_kv_heads; ++head) {
      const int64_t offset = SizeOf(cache.dtype) *
                             cache.Offset(slot / cache.block_size, head, slot % cache.block_size);
      float* const key = rows.row<float>(t) + head * cache.head_dim;
      visit(static_cast<char*>(cache.keys) + offset, cache.k_scale, key);
      visit(static_cast<char*>(cache.values) + offset, cache.v_scale, key + cols);
    }
  }
}

}  // namespace

TouchedBlocks TouchBlocks(std::span<const int64_t> slots, int64_t block_size) {
  TouchedBlocks touched;
  for (const int64_t slot : slots) {
    if (slot != kNoSlot) touched.blocks.push_back(slot / block_size);
  }
  std::vector<int64_t>& blocks = touched.blocks;
  std::sort(blocks.begin(), blocks.end());
  blocks.erase(std::unique(blocks.begin(), blocks.end()), blocks.end());
  for (const int64_t slot : slots) {
    if (slot == kNoSlot) {
      touched.slots.push_back(kNoSlot);
      continue;
    }
    const auto block = std::lower_bound(blocks.begin(), blocks.end(), slot / block_size);
    touched.slots.push_back((block - blocks.begin()) * block_size + slot % block_size);
  }
  return touched;
}

void ReadKvRows(const KvCacheView& cache, std::span<const int64_t> slots, const MatrixView& rows) {
  for (int64_t t = 0; t < rows.rows; ++t) std::fill_n(rows.row<float>(t), rows.cols, 0.0f);
  ForEachVector(cache, slots, rows, [&](const char* stored, float scale, float* row) {
    FromCache(stored, scale, cache.dtype, row, cache.head_dim);
  });
}

void WriteKvRows(const MatrixView& rows, std::span<const int64_t> slots, const KvCacheView& cache) {
  ForEachVector(cache, slots, rows, [&](char* stored, float scale, const float* row) {
    ToCache(row, scale, cache.dtype, stored, cache.head_dim);
  });
}

}  // namespace lockstep
