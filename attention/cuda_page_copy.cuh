// Copies of a cache's pages by Hopper's copy engine: the kernel's side of cuda_page_copy.h.
#pragma once

#include "attention/cuda_page_copy.h"
#include "attention/cuda_tensor_core.cuh"
#include "runtime/core/cuda_async_copy.cuh"

namespace lockstep {

// The box whose first row of the matrix is `row`, a multiple of 8, and whose first panel is
// `panel`, to `to` (a shared address, a multiple of 1024). One thread's.
__device__ inline void CopyPageBox(uint32_t to, const PageMap& map, int32_t row, int32_t panel,
                                   uint64_t* barrier) {
  CopyBox(to, reinterpret_cast<const CUtensorMap*>(&map), panel * (kPanelBytes / 2), 0, 0,
          row / kPageRowMultiple, barrier);
}

// Offset of the 16-byte piece `piece` of row `row` in an array of boxes, one after the other, of
// `panels` panels each.
__device__ inline uint32_t BoxOffset(int row, int piece, int panels) {
  return static_cast<uint32_t>(((row / 8 * panels + piece / 8) * 8 + row % 8) * 128 +
                               (piece % 8 ^ row % 8) * 16);
}

}  // namespace lockstep
