#include "cache/block_table.h"

namespace lockstep {

void FillSlotMapping(std::span<const BlockId> block_table, int64_t block_size,
                     int64_t first_position, int64_t count, int64_t* slots) {
  LOCKSTEP_CHECK(block_size >= 1 && first_position >= 0 && count >= 0);
  LOCKSTEP_CHECK(BlocksForTokens(first_position + count, block_size) <=
                     static_cast<int64_t>(block_table.size()) ||
                 count == 0);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t position = first_position + i;
    slots[i] = block_table[position / block_size] * block_size + position % block_size;
  }
}

}  // namespace lockstep
