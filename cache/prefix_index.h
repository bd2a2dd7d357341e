// Finds full blocks whose tokens a new request begins with, so that they need not be computed
// again. Lives on rank 0 beside the scheduler.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "cache/block_allocator.h"
#include "runtime/core/hash.h"

namespace lockstep {

// A block is found under the chained 128-bit hash of all tokens from the beginning of the sequence
// to its end, and of the request's salt. The hash is no proof: the block's own tokens, the identity
// of the block before it, and at the beginning the salt are compared, so equal hashes of different
// sequences (made on purpose, say) never share. Which blocks stay is the allocator's decision:
// indexed blocks are kept, and forgotten here when they are handed out again. Costs O(block_size) a
// block. Not thread-safe.
class PrefixIndex {
 public:
  // How far a sequence's blocks have been looked up or inserted. Starts empty.
  struct Chain {
    Hash128 hash;
    uint64_t serial = 0;  // of the last block; 0 at the beginning
    int64_t num_blocks = 0;
    bool broken = false;  // a different sequence has this one's hash: nothing more can be inserted
  };

  // Becomes the allocator's on_evict. The allocator must outlive the index.
  PrefixIndex(int64_t block_size, BlockAllocator& allocator);

  // Follows the longest known prefix of `tokens` in at most `max_blocks` full blocks: retains each
  // block, appends it to `blocks`, and returns the chain up to there.
  Chain Acquire(const std::string& salt, std::span<const int32_t> tokens, int64_t max_blocks,
                std::vector<BlockId>& blocks);

  // Whether the sequence, of which `chain` has been followed, goes on with a known block. A chain
  // whose last block has been forgotten meanwhile does not.
  bool Continues(const std::string& salt, std::span<const int32_t> tokens,
                 const Chain& chain) const;

  // The next full block of the sequence that `chain` has followed: `tokens` are the block's own,
  // [block_size]. The caller owns the block, its K and V are going to be what the tokens say before
  // anyone reads them. Where the sequence is known already, the older block stays the known one.
  void Insert(const std::string& salt, Chain& chain, std::span<const int32_t> tokens,
              BlockId block);

  // The block is no longer to be found (its content is not to be trusted).
  void Erase(BlockId block);
  // Nothing is to be found any more.
  void Clear();

  int64_t num_blocks() const { return static_cast<int64_t>(block_of_hash_.size()); }

  // Internal, naming the block, when the index, its nodes and the allocator contradict each other.
  absl::Status CheckInvariants() const;

 private:
  struct Node {
    Hash128 hash;
    uint64_t serial = 0;         // 0: the block is not in the index; else never used twice
    uint64_t parent_serial = 0;  // of the block before; 0 for a first block
    std::string salt;            // of a first block
  };

  Hash128 HashOf(const std::string& salt, const Chain& chain, const int32_t* tokens) const;
  // The known block that goes on from `chain` with these tokens; -1 where there is none, or a
  // different sequence has its hash.
  BlockId Find(const std::string& salt, const Chain& chain, const Hash128& hash,
               const int32_t* tokens) const;

  const int64_t block_size_;
  BlockAllocator& allocator_;
  uint64_t next_serial_ = 1;
  absl::flat_hash_map<Hash128, BlockId> block_of_hash_;
  std::vector<Node> nodes_;      // [num_blocks]
  std::vector<int32_t> tokens_;  // [num_blocks, block_size]
};

}  // namespace lockstep
