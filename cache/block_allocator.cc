#include "cache/block_allocator.h"

namespace lockstep {

BlockAllocator::BlockAllocator(int64_t num_blocks) {
  LOCKSTEP_CHECK(num_blocks >= 0 && num_blocks <= INT32_MAX);
  ref_counts_.assign(num_blocks, 0);
  // The list is a stack: block 0 on top, so that a fresh pool hands out 0, 1, 2, ...
  free_.resize(num_blocks);
  for (int64_t i = 0; i < num_blocks; ++i) free_[i] = static_cast<BlockId>(num_blocks - 1 - i);
}

int64_t BlockAllocator::num_blocks() const { return static_cast<int64_t>(ref_counts_.size()); }

int64_t BlockAllocator::num_free() const { return static_cast<int64_t>(free_.size()); }

absl::StatusOr<std::vector<BlockId>> BlockAllocator::Allocate(int64_t count) {
  LOCKSTEP_CHECK(count >= 0);
  if (count > num_free()) {
    return absl::ResourceExhaustedError(absl::StrFormat(
        "KV cache: %d blocks are wanted and %d of %d are free", count, num_free(), num_blocks()));
  }
  std::vector<BlockId> blocks(free_.rbegin(), free_.rbegin() + count);
  free_.resize(free_.size() - count);
  for (BlockId block : blocks) ref_counts_[block] = 1;
  return blocks;
}

void BlockAllocator::Retain(BlockId block) {
  LOCKSTEP_CHECK(RefCount(block) > 0);
  LOCKSTEP_CHECK(ref_counts_[block] < INT32_MAX);
  ++ref_counts_[block];
}

void BlockAllocator::Release(std::span<const BlockId> blocks) {
  for (BlockId block : blocks) {
    LOCKSTEP_CHECK(RefCount(block) > 0);
    if (--ref_counts_[block] == 0) free_.push_back(block);
  }
}

int BlockAllocator::RefCount(BlockId block) const {
  LOCKSTEP_CHECK(block >= 0 && block < num_blocks());
  return ref_counts_[block];
}

absl::Status BlockAllocator::CheckInvariants() const {
  std::vector<bool> listed(ref_counts_.size(), false);
  for (BlockId block : free_) {
    if (block < 0 || block >= num_blocks()) {
      return absl::InternalError(
          absl::StrFormat("the free list holds block %d, of %d blocks", block, num_blocks()));
    }
    if (listed[block]) {
      return absl::InternalError(absl::StrFormat("block %d is twice in the free list", block));
    }
    listed[block] = true;
  }
  for (int64_t block = 0; block < num_blocks(); ++block) {
    if (ref_counts_[block] < 0 || listed[block] != (ref_counts_[block] == 0)) {
      return absl::InternalError(absl::StrFormat("block %d has %d owners and is %s the free list",
                                                 block, ref_counts_[block],
                                                 listed[block] ? "in" : "not in"));
    }
  }
  return absl::OkStatus();
}

}  // namespace lockstep
