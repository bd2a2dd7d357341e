#include "cache/block_allocator.h"

namespace lockstep {

BlockAllocator::BlockAllocator(int64_t num_blocks) {
  LOCKSTEP_CHECK(num_blocks >= 0 && num_blocks < INT32_MAX);
  ref_counts_.assign(num_blocks, 0);
  kept_.assign(num_blocks, false);
  // Block 0 on top, so that a fresh pool hands out 0, 1, 2, ...
  free_.resize(num_blocks);
  for (int64_t i = 0; i < num_blocks; ++i) free_[i] = static_cast<BlockId>(num_blocks - 1 - i);
  const BlockId ring = static_cast<BlockId>(num_blocks);
  next_.assign(num_blocks + 1, ring);
  previous_.assign(num_blocks + 1, ring);
}

bool BlockAllocator::Allocate(int64_t count, std::vector<BlockId>& blocks) {
  LOCKSTEP_CHECK(count >= 0);
  if (count > num_free()) return false;
  for (int64_t i = 0; i < count; ++i) {
    BlockId block;
    if (!free_.empty()) {
      block = free_.back();
      free_.pop_back();
    } else {
      block = next_[num_blocks()];
      UnlinkKeptFree(block);
      kept_[block] = false;
      if (on_evict_) on_evict_(block);
      if (on_lost_) on_lost_(block);
    }
    ref_counts_[block] = 1;
    blocks.push_back(block);
  }
  return true;
}

void BlockAllocator::Retain(BlockId block) {
  LOCKSTEP_CHECK(RefCount(block) < INT32_MAX);
  if (ref_counts_[block] == 0) {
    LOCKSTEP_CHECK(kept_[block]);
    UnlinkKeptFree(block);
  }
  ++ref_counts_[block];
}

void BlockAllocator::Release(std::span<const BlockId> blocks) {
  // From the end: the beginning of a prefix is the most useful part of it, and is to be lost last.
  for (size_t i = blocks.size(); i-- > 0;) {
    const BlockId block = blocks[i];
    LOCKSTEP_CHECK(RefCount(block) > 0);
    if (--ref_counts_[block] > 0) continue;
    ++num_releases_;
    kept_[block] ? PushKeptFree(block) : PushFree(block);
  }
}

int BlockAllocator::RefCount(BlockId block) const {
  LOCKSTEP_CHECK(block >= 0 && block < num_blocks());
  return ref_counts_[block];
}

void BlockAllocator::Keep(BlockId block) {
  LOCKSTEP_CHECK(RefCount(block) > 0);
  kept_[block] = true;
}

void BlockAllocator::Forget(BlockId block) {
  LOCKSTEP_CHECK(block >= 0 && block < num_blocks());
  if (!kept_[block]) return;
  kept_[block] = false;
  if (ref_counts_[block] > 0) return;
  UnlinkKeptFree(block);
  PushFree(block);
}

void BlockAllocator::PushFree(BlockId block) {
  free_.push_back(block);
  if (on_lost_) on_lost_(block);
}

void BlockAllocator::PushKeptFree(BlockId block) {
  const BlockId ring = static_cast<BlockId>(num_blocks());
  next_[block] = ring;
  previous_[block] = previous_[ring];
  next_[previous_[ring]] = block;
  previous_[ring] = block;
  ++num_kept_free_;
}

void BlockAllocator::UnlinkKeptFree(BlockId block) {
  next_[previous_[block]] = next_[block];
  previous_[next_[block]] = previous_[block];
  --num_kept_free_;
}

absl::Status BlockAllocator::CheckInvariants() const {
  std::vector<int> times_listed(ref_counts_.size(), 0);
  for (const BlockId block : free_) {
    if (block < 0 || block >= num_blocks() || kept_[block]) {
      return absl::InternalError(absl::StrFormat(
          "the free list holds block %d, of %d blocks, or kept", block, num_blocks()));
    }
    ++times_listed[block];
  }
  const BlockId ring = static_cast<BlockId>(num_blocks());
  int64_t listed_kept = 0;
  for (BlockId block = next_[ring]; block != ring; block = next_[block]) {
    if (!kept_[block] || next_[previous_[block]] != block || ++listed_kept > num_kept_free_) {
      return absl::InternalError(
          absl::StrFormat("the list of kept free blocks is broken at block %d", block));
    }
    ++times_listed[block];
  }
  if (listed_kept != num_kept_free_) {
    return absl::InternalError(
        absl::StrFormat("%d kept free blocks are listed, %d counted", listed_kept, num_kept_free_));
  }
  for (int64_t block = 0; block < num_blocks(); ++block) {
    if (ref_counts_[block] < 0 || times_listed[block] != (ref_counts_[block] == 0 ? 1 : 0)) {
      return absl::InternalError(
          absl::StrFormat("block %d has %d owners and is listed as free %d times", block,
                          ref_counts_[block], times_listed[block]));
    }
  }
  return absl::OkStatus();
}

}  // namespace lockstep
