#include "cache/prefix_index.h"

#include <algorithm>

namespace lockstep {

PrefixIndex::PrefixIndex(int64_t block_size, BlockAllocator& allocator)
    : block_size_(block_size),
      allocator_(allocator),
      nodes_(static_cast<size_t>(allocator.num_blocks())),
      tokens_(static_cast<size_t>(allocator.num_blocks() * block_size)) {
  LOCKSTEP_CHECK(block_size >= 1);
  allocator_.set_on_evict([this](BlockId block) { Erase(block); });
}

Hash128 PrefixIndex::HashOf(const std::string& salt, const Chain& chain,
                            const int32_t* tokens) const {
  const Hash128 start =
      chain.num_blocks == 0 ? HashChained({}, salt.data(), salt.size()) : chain.hash;
  return HashChained(start, tokens, static_cast<size_t>(block_size_) * sizeof(int32_t));
}

BlockId PrefixIndex::Find(const std::string& salt, const Chain& chain, const Hash128& hash,
                          const int32_t* tokens) const {
  const auto found = block_of_hash_.find(hash);
  if (found == block_of_hash_.end()) return -1;
  const BlockId block = found->second;
  const Node& node = nodes_[block];
  const bool same = node.parent_serial == chain.serial &&
                    (chain.num_blocks > 0 || node.salt == salt) &&
                    std::equal(tokens, tokens + block_size_, &tokens_[block * block_size_]);
  return same ? block : -1;
}

PrefixIndex::Chain PrefixIndex::Acquire(const std::string& salt, std::span<const int32_t> tokens,
                                        int64_t max_blocks, std::vector<BlockId>& blocks) {
  Chain chain;
  max_blocks = std::min(max_blocks, static_cast<int64_t>(tokens.size()) / block_size_);
  while (chain.num_blocks < max_blocks) {
    const int32_t* own = tokens.data() + chain.num_blocks * block_size_;
    const Hash128 hash = HashOf(salt, chain, own);
    const BlockId block = Find(salt, chain, hash, own);
    if (block < 0) break;
    allocator_.Retain(block);
    blocks.push_back(block);
    chain.hash = hash;
    chain.serial = nodes_[block].serial;
    ++chain.num_blocks;
  }
  return chain;
}

bool PrefixIndex::Continues(const std::string& salt, std::span<const int32_t> tokens,
                            const Chain& chain) const {
  if ((chain.num_blocks + 1) * block_size_ > std::ssize(tokens)) return false;
  const int32_t* own = tokens.data() + chain.num_blocks * block_size_;
  return Find(salt, chain, HashOf(salt, chain, own), own) >= 0;
}

void PrefixIndex::Insert(const std::string& salt, Chain& chain, std::span<const int32_t> tokens,
                         BlockId block) {
  LOCKSTEP_CHECK(static_cast<int64_t>(tokens.size()) == block_size_);
  if (chain.broken) return;
  const Hash128 hash = HashOf(salt, chain, tokens.data());
  const BlockId known = Find(salt, chain, hash, tokens.data());
  if (known >= 0) {
    chain.serial = nodes_[known].serial;
  } else if (block_of_hash_.contains(hash) || nodes_[block].serial != 0) {
    // Another sequence's, or an older place of the block itself: never indexed twice.
    chain.broken = true;
    return;
  } else {
    allocator_.Keep(block);
    block_of_hash_[hash] = block;
    std::copy(tokens.begin(), tokens.end(), &tokens_[block * block_size_]);
    nodes_[block] = {.hash = hash,
                     .serial = next_serial_++,
                     .parent_serial = chain.serial,
                     .salt = chain.num_blocks == 0 ? salt : std::string()};
    chain.serial = nodes_[block].serial;
  }
  chain.hash = hash;
  ++chain.num_blocks;
}

void PrefixIndex::Erase(BlockId block) {
  Node& node = nodes_[block];
  if (node.serial == 0) return;
  block_of_hash_.erase(node.hash);
  node = {};
  allocator_.Forget(block);
}

void PrefixIndex::Clear() {
  for (int64_t block = 0; block < allocator_.num_blocks(); ++block) {
    Erase(static_cast<BlockId>(block));
  }
}

absl::Status PrefixIndex::CheckInvariants() const {
  int64_t indexed = 0;
  for (int64_t block = 0; block < allocator_.num_blocks(); ++block) {
    const Node& node = nodes_[block];
    const bool kept = allocator_.kept(static_cast<BlockId>(block));
    if ((node.serial != 0) != kept) {
      return absl::InternalError(absl::StrFormat("block %d is %s the prefix index and is %s", block,
                                                 kept ? "not in" : "in",
                                                 kept ? "kept" : "not kept"));
    }
    if (node.serial == 0) continue;
    ++indexed;
    const auto found = block_of_hash_.find(node.hash);
    if (found == block_of_hash_.end() || found->second != block) {
      return absl::InternalError(
          absl::StrFormat("block %d is not found under its hash in the prefix index", block));
    }
  }
  if (indexed != num_blocks()) {
    return absl::InternalError(absl::StrFormat(
        "the prefix index names %d blocks, %d are marked as indexed", num_blocks(), indexed));
  }
  return absl::OkStatus();
}

}  // namespace lockstep
