// Which physical blocks are in use. Lives on rank 0 beside the scheduler; other ranks follow the
// plan.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "runtime/core/status.h"

namespace lockstep {

using BlockId = int32_t;

// Reference-counted blocks 0 .. num_blocks-1. Not thread-safe.
class BlockAllocator {
 public:
  explicit BlockAllocator(int64_t num_blocks);

  int64_t num_blocks() const;
  int64_t num_free() const;

  // All or nothing: `count` blocks with one reference each, or ResourceExhausted and no change.
  absl::StatusOr<std::vector<BlockId>> Allocate(int64_t count);
  // One more owner of an allocated block (a shared prefix).
  void Retain(BlockId block);
  // One owner less each; a block without owners is free again. Freed blocks are handed out again
  // last-freed first.
  void Release(std::span<const BlockId> blocks);
  int RefCount(BlockId block) const;

  // For debug builds: Internal, naming the block, when the free list and the counts contradict each
  // other.
  absl::Status CheckInvariants() const;

 private:
  std::vector<int32_t> ref_counts_;
  std::vector<BlockId> free_;
};

}  // namespace lockstep
