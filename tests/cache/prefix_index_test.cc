#include "cache/prefix_index.h"

#include <gtest/gtest.h>

#include <map>
#include <random>

namespace lockstep {
namespace {

constexpr int64_t kBlockSize = 4;

std::vector<int32_t> Tokens(int64_t count, int32_t first = 0) {
  std::vector<int32_t> tokens(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) tokens[i] = first + static_cast<int32_t>(i);
  return tokens;
}

// An allocator, an index, and sequences whose blocks are computed and inserted.
class PrefixIndexTest : public testing::Test {
 protected:
  explicit PrefixIndexTest(int64_t num_blocks = 16)
      : allocator_(num_blocks), index_(kBlockSize, allocator_) {}

  // Looks the sequence up, takes new blocks for the rest, inserts all full ones.
  std::vector<BlockId> Run(const std::vector<int32_t>& tokens, const std::string& salt = "",
                           int64_t* hits = nullptr) {
    std::vector<BlockId> blocks;
    PrefixIndex::Chain chain = index_.Acquire(salt, tokens, 1000, blocks);
    if (hits != nullptr) *hits = chain.num_blocks;
    const int64_t num_blocks = (std::ssize(tokens) + kBlockSize - 1) / kBlockSize;
    EXPECT_TRUE(allocator_.Allocate(num_blocks - std::ssize(blocks), blocks));
    for (int64_t i = chain.num_blocks; (i + 1) * kBlockSize <= std::ssize(tokens); ++i) {
      index_.Insert(salt, chain, std::span(tokens).subspan(i * kBlockSize, kBlockSize), blocks[i]);
    }
    EXPECT_TRUE(index_.CheckInvariants().ok()) << index_.CheckInvariants();
    return blocks;
  }
  int64_t Hits(const std::vector<int32_t>& tokens, const std::string& salt = "",
               int64_t max_blocks = 1000) {
    std::vector<BlockId> blocks;
    const int64_t hits = index_.Acquire(salt, tokens, max_blocks, blocks).num_blocks;
    EXPECT_EQ(hits, std::ssize(blocks));
    allocator_.Release(blocks);
    return hits;
  }

  BlockAllocator allocator_;
  PrefixIndex index_;
};

TEST_F(PrefixIndexTest, FindsTheLongestCommonPrefixInFullBlocks) {
  const std::vector<BlockId> blocks = Run(Tokens(14));  // three full blocks
  EXPECT_EQ(index_.num_blocks(), 3);
  EXPECT_EQ(Hits(Tokens(14)), 3);
  EXPECT_EQ(Hits(Tokens(12)), 3);
  EXPECT_EQ(Hits(Tokens(11)), 2);
  EXPECT_EQ(Hits(Tokens(100)), 3);
  EXPECT_EQ(Hits(Tokens(14), "", 2), 2);
  std::vector<int32_t> other = Tokens(14);
  other[5] = 77;
  EXPECT_EQ(Hits(other), 1);
  // The same block's tokens elsewhere in a sequence are another block.
  EXPECT_EQ(Hits(Tokens(8, 4)), 0);
  std::vector<BlockId> found;
  index_.Acquire("", Tokens(14), 1000, found);
  EXPECT_EQ(found, std::vector<BlockId>(blocks.begin(), blocks.begin() + 3));
  for (const BlockId block : found) EXPECT_EQ(allocator_.RefCount(block), 2);
}

TEST_F(PrefixIndexTest, SaltsDoNotShare) {
  Run(Tokens(8), "a");
  EXPECT_EQ(Hits(Tokens(8), "a"), 2);
  EXPECT_EQ(Hits(Tokens(8), "b"), 0);
  EXPECT_EQ(Hits(Tokens(8)), 0);
}

TEST_F(PrefixIndexTest, FreedBlocksAreFoundUntilTheyAreHandedOut) {
  allocator_.Release(Run(Tokens(16)));
  allocator_.Release(Run(Tokens(32, 100)));  // with it 12 of 16 blocks are kept
  EXPECT_EQ(Hits(Tokens(16)), 4);            // now the most recently used
  std::vector<BlockId> blocks;
  ASSERT_TRUE(allocator_.Allocate(4 + 3, blocks));  // the free ones, then the least recently used
  EXPECT_EQ(Hits(Tokens(16)), 4);
  EXPECT_EQ(Hits(Tokens(32, 100)), 5) << "its end is lost first";
  ASSERT_TRUE(allocator_.Allocate(9, blocks));
  EXPECT_EQ(Hits(Tokens(16)), 0);
  EXPECT_EQ(index_.num_blocks(), 0);
  EXPECT_TRUE(index_.CheckInvariants().ok()) << index_.CheckInvariants();
}

TEST_F(PrefixIndexTest, TheOlderOfTwoEqualBlocksStays) {
  std::vector<BlockId> first, second;
  ASSERT_TRUE(allocator_.Allocate(2, first));
  ASSERT_TRUE(allocator_.Allocate(2, second));
  const std::vector<int32_t> tokens = Tokens(8);
  PrefixIndex::Chain a, b;
  for (int i = 0; i < 2; ++i) {
    const auto own = std::span(tokens).subspan(i * kBlockSize, kBlockSize);
    index_.Insert("", a, own, first[i]);
    index_.Insert("", b, own, second[i]);
  }
  EXPECT_EQ(index_.num_blocks(), 2);
  EXPECT_EQ(b.num_blocks, 2);
  EXPECT_EQ(a.serial, b.serial);
  std::vector<BlockId> found;
  index_.Acquire("", tokens, 1000, found);
  EXPECT_EQ(found, first);
  EXPECT_FALSE(allocator_.kept(second[0]));
}

TEST_F(PrefixIndexTest, ErasedBlocksAreNotFound) {
  const std::vector<BlockId> blocks = Run(Tokens(16));
  index_.Erase(blocks[1]);
  EXPECT_EQ(Hits(Tokens(16)), 1);
  EXPECT_FALSE(allocator_.kept(blocks[1]));
  // The blocks behind belong to a block that is gone: a new one in its place is another.
  allocator_.Release(blocks);
  int64_t hits = -1;
  const std::vector<BlockId> again = Run(Tokens(8), "", &hits);
  EXPECT_EQ(hits, 1);
  EXPECT_EQ(Hits(Tokens(16)), 2);
  index_.Clear();
  EXPECT_EQ(index_.num_blocks(), 0);
  EXPECT_EQ(Hits(Tokens(16)), 0);
  allocator_.Release(again);
  EXPECT_TRUE(allocator_.CheckInvariants().ok());
}

// Against a map that holds whole sequences.
TEST_F(PrefixIndexTest, RandomUseFindsWhatWasInsertedAndNothingElse) {
  std::mt19937 random(3);
  std::vector<std::vector<BlockId>> held;
  // Block -> the sequence from its beginning to its end, as of the last insertion.
  std::map<BlockId, std::vector<int32_t>> content;
  for (int round = 0; round < 3000; ++round) {
    std::vector<int32_t> tokens(1 + random() % 20);
    for (int32_t& token : tokens) token = static_cast<int32_t>(random() % 2);
    std::vector<BlockId> blocks;
    PrefixIndex::Chain chain = index_.Acquire("", tokens, 1000, blocks);
    for (int64_t i = 0; i < chain.num_blocks; ++i) {
      const std::vector<int32_t> prefix(tokens.begin(), tokens.begin() + (i + 1) * kBlockSize);
      ASSERT_EQ(content[blocks[i]], prefix);
    }
    const int64_t wanted = (std::ssize(tokens) + kBlockSize - 1) / kBlockSize;
    if (!allocator_.Allocate(wanted - std::ssize(blocks), blocks)) {
      allocator_.Release(blocks);
    } else {
      for (int64_t i = chain.num_blocks; (i + 1) * kBlockSize <= std::ssize(tokens); ++i) {
        const auto own = std::span(tokens).subspan(i * kBlockSize, kBlockSize);
        index_.Insert("", chain, own, blocks[i]);
        content[blocks[i]] = {tokens.begin(), tokens.begin() + (i + 1) * kBlockSize};
      }
      held.push_back(blocks);
    }
    while (held.size() > random() % 4) {
      const size_t victim = random() % held.size();
      allocator_.Release(held[victim]);
      held.erase(held.begin() + static_cast<std::ptrdiff_t>(victim));
    }
    ASSERT_TRUE(index_.CheckInvariants().ok()) << index_.CheckInvariants();
    ASSERT_TRUE(allocator_.CheckInvariants().ok()) << allocator_.CheckInvariants();
  }
}

}  // namespace
}  // namespace lockstep
