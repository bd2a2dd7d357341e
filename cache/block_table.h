// The read map (logical block -> physical block) and the write map (new token -> slot) of a
// request. See README.md beside this file: the two are made here, on the host, and never derived
// from one another inside a kernel.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cache/block_allocator.h"
#include "cache/kv_view.h"

namespace lockstep {

// Blocks that hold `num_tokens` tokens.
inline int64_t BlocksForTokens(int64_t num_tokens, int64_t block_size) {
  return (num_tokens + block_size - 1) / block_size;
}

// Slots of the tokens at positions [first, first + count) of a request, into slots[0, count). The
// table must reach that far (a bug otherwise).
void FillSlotMapping(std::span<const BlockId> block_table, int64_t block_size,
                     int64_t first_position, int64_t count, int64_t* slots);

}  // namespace lockstep
