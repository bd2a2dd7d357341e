// Which physical blocks are in use, and which free ones still hold something worth keeping. Lives
// on rank 0 beside the scheduler; other ranks follow the plan.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <utility>
#include <vector>

#include "runtime/core/status.h"

namespace lockstep {

using BlockId = int32_t;

// Reference-counted blocks 0 .. num_blocks-1. A block may be marked as kept: when its last owner
// leaves, it is free as others are, but handed out after all of those, least recently used first,
// and until then an owner may come back to it. Every call costs O(1) a block. Not thread-safe.
class BlockAllocator {
 public:
  explicit BlockAllocator(int64_t num_blocks);

  // Called for a kept block that is handed out to a new owner: its content is lost.
  void set_on_evict(std::function<void(BlockId)> on_evict) { on_evict_ = std::move(on_evict); }
  // Called for every block whose content is nobody's any more: freed and not kept, or evicted.
  void set_on_lost(std::function<void(BlockId)> on_lost) { on_lost_ = std::move(on_lost); }

  int64_t num_blocks() const { return static_cast<int64_t>(ref_counts_.size()); }
  // Blocks without owner, kept ones included.
  int64_t num_free() const { return static_cast<int64_t>(free_.size()) + num_kept_free_; }
  int64_t num_kept_free() const { return num_kept_free_; }

  // All or nothing: appends `count` blocks with one reference each; false and no change when there
  // are fewer free ones.
  bool Allocate(int64_t count, std::vector<BlockId>& blocks);
  // One more owner: of an allocated block, or of a free one that was kept.
  void Retain(BlockId block);
  // One owner less each; a block without owners is free. Of kept blocks the first of `blocks`
  // counts as the most recently used: give a prefix from its beginning. Others are handed out again
  // last-freed first.
  void Release(std::span<const BlockId> blocks);
  int RefCount(BlockId block) const;

  // From now on the block is kept when its last owner leaves. It has an owner now.
  void Keep(BlockId block);
  // The block's content is no longer worth keeping.
  void Forget(BlockId block);
  bool kept(BlockId block) const { return kept_[block]; }

  // Grows whenever a block becomes free.
  uint64_t num_releases() const { return num_releases_; }

  // Internal, naming the block, when the lists and the counts contradict each other.
  absl::Status CheckInvariants() const;

 private:
  void PushFree(BlockId block);
  void PushKeptFree(BlockId block);
  void UnlinkKeptFree(BlockId block);

  std::vector<int32_t> ref_counts_;
  std::vector<BlockId> free_;  // a stack
  std::vector<bool> kept_;
  // The kept free blocks as a ring through node num_blocks: next_[num_blocks] is the least recently
  // used one.
  std::vector<BlockId> next_;
  std::vector<BlockId> previous_;
  int64_t num_kept_free_ = 0;
  uint64_t num_releases_ = 0;
  std::function<void(BlockId)> on_evict_;
  std::function<void(BlockId)> on_lost_;
};

}  // namespace lockstep
