// The keys and values of a step's tokens, taken out of a KV cache in host memory and put back: for
// who looks at what a device has written there.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cache/kv_view.h"
#include "runtime/core/buffer.h"

namespace lockstep {

// Blocks of a cache that hold some slots, and the same slots in a cache of those blocks alone.
struct TouchedBlocks {
  std::vector<int64_t> blocks;  // ascending, each once
  std::vector<int64_t> slots;   // [T]; kNoSlot stays
};
TouchedBlocks TouchBlocks(std::span<const int64_t> slots, int64_t block_size);

// rows[t] = keys, then values of slot slots[t]; zeros for kNoSlot. rows: float32
// [T, 2 * Hkv_local * D], with or without gaps between rows.
void ReadKvRows(const KvCacheView& cache, std::span<const int64_t> slots, const MatrixView& rows);
// The reverse; a number that ReadKvRows gave is stored as the same bits.
void WriteKvRows(const MatrixView& rows, std::span<const int64_t> slots, const KvCacheView& cache);

}  // namespace lockstep
