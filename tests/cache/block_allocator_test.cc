#include "cache/block_allocator.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>

namespace lockstep {
namespace {

std::vector<BlockId> Take(BlockAllocator& allocator, int64_t count) {
  std::vector<BlockId> blocks;
  EXPECT_TRUE(allocator.Allocate(count, blocks));
  return blocks;
}

TEST(BlockAllocatorTest, HandsOutEveryBlockOnce) {
  BlockAllocator allocator(5);
  const auto blocks = Take(allocator, 5);
  EXPECT_EQ(std::set<BlockId>(blocks.begin(), blocks.end()), (std::set<BlockId>{0, 1, 2, 3, 4}));
  EXPECT_EQ(allocator.num_free(), 0);
  for (BlockId block : blocks) EXPECT_EQ(allocator.RefCount(block), 1);
  EXPECT_TRUE(allocator.CheckInvariants().ok());
}

TEST(BlockAllocatorTest, AllocatesAllOrNothing) {
  BlockAllocator allocator(4);
  std::vector<BlockId> blocks = Take(allocator, 3);
  EXPECT_FALSE(allocator.Allocate(2, blocks));
  EXPECT_EQ(blocks.size(), 3u);
  EXPECT_EQ(allocator.num_free(), 1);
  EXPECT_TRUE(allocator.CheckInvariants().ok());
  EXPECT_TRUE(allocator.Allocate(1, blocks));
  EXPECT_TRUE(allocator.Allocate(0, blocks));
  EXPECT_EQ(blocks.size(), 4u);
}

TEST(BlockAllocatorTest, SharedBlockIsFreedByItsLastOwner) {
  BlockAllocator allocator(2);
  const BlockId block = Take(allocator, 1)[0];
  allocator.Retain(block);
  EXPECT_EQ(allocator.RefCount(block), 2);
  allocator.Release(std::vector<BlockId>{block});
  EXPECT_EQ(allocator.RefCount(block), 1);
  EXPECT_EQ(allocator.num_free(), 1);
  allocator.Release(std::vector<BlockId>{block});
  EXPECT_EQ(allocator.RefCount(block), 0);
  EXPECT_EQ(allocator.num_free(), 2);
}

TEST(BlockAllocatorTest, ReusesTheLastFreedBlockFirst) {
  BlockAllocator allocator(8);
  const auto blocks = Take(allocator, 6);
  allocator.Release(std::vector<BlockId>{blocks[4]});
  allocator.Release(std::vector<BlockId>{blocks[1]});
  EXPECT_EQ(Take(allocator, 2), (std::vector<BlockId>{blocks[1], blocks[4]}));
}

TEST(BlockAllocatorTest, KeptBlocksGoLastLeastRecentlyUsedFirst) {
  BlockAllocator allocator(6);
  std::vector<BlockId> evicted, lost;
  allocator.set_on_evict([&](BlockId block) { evicted.push_back(block); });
  allocator.set_on_lost([&](BlockId block) { lost.push_back(block); });
  const auto blocks = Take(allocator, 6);
  for (const BlockId block : {0, 1, 2, 3}) allocator.Keep(block);
  allocator.Release(std::vector<BlockId>{0, 1});  // a prefix: 1 is to be lost before 0
  allocator.Release(std::vector<BlockId>{2, 3, 4});
  EXPECT_EQ(lost, std::vector<BlockId>{4}) << "kept blocks are not lost when they are freed";
  EXPECT_EQ(allocator.num_free(), 5);
  EXPECT_EQ(allocator.num_kept_free(), 4);
  allocator.Retain(1);  // somebody comes back
  EXPECT_EQ(allocator.RefCount(1), 1);
  allocator.Release(std::vector<BlockId>{1});
  allocator.Forget(3);
  EXPECT_EQ(lost, (std::vector<BlockId>{4, 3}));
  EXPECT_TRUE(allocator.CheckInvariants().ok()) << allocator.CheckInvariants();
  EXPECT_EQ(Take(allocator, 5), (std::vector<BlockId>{3, 4, 0, 2, 1}));
  EXPECT_EQ(evicted, (std::vector<BlockId>{0, 2, 1}));
  EXPECT_EQ(lost, (std::vector<BlockId>{4, 3, 0, 2, 1}));
  for (BlockId block = 0; block < 6; ++block) EXPECT_FALSE(allocator.kept(block));
}

TEST(BlockAllocatorTest, KeepsItsInvariantsUnderRandomUse) {
  std::mt19937 rng(7);
  BlockAllocator allocator(64);
  std::vector<BlockId> held;  // one entry a reference
  for (int step = 0; step < 5000; ++step) {
    const int action = static_cast<int>(rng() % 4);
    if (action == 0) {
      const int64_t before = allocator.num_free();
      const int64_t count = static_cast<int64_t>(rng() % 8);
      const bool ok = allocator.Allocate(count, held);
      ASSERT_EQ(ok, count <= before);
      ASSERT_EQ(allocator.num_free(), before - (ok ? count : 0));
    } else if (!held.empty()) {
      const size_t i = rng() % held.size();
      if (action == 1 && held.size() < 200) {
        allocator.Retain(held[i]);
        held.push_back(held[i]);
      } else if (action == 2) {
        rng() % 2 == 0 ? allocator.Keep(held[i]) : allocator.Forget(held[i]);
      } else {
        allocator.Release(std::span(&held[i], 1));
        held.erase(held.begin() + static_cast<std::ptrdiff_t>(i));
      }
    }
    const BlockId any = static_cast<BlockId>(rng() % 64);
    if (rng() % 16 == 0 && allocator.RefCount(any) == 0 && allocator.kept(any)) {
      allocator.Retain(any);
      held.push_back(any);
    }
    ASSERT_TRUE(allocator.CheckInvariants().ok()) << allocator.CheckInvariants();
    for (BlockId block = 0; block < 64; ++block) {
      ASSERT_EQ(allocator.RefCount(block), std::count(held.begin(), held.end(), block));
    }
  }
}

TEST(BlockAllocatorDeathTest, MisuseIsABug) {
  BlockAllocator allocator(2);
  const std::vector<BlockId> blocks = Take(allocator, 1);
  allocator.Release(blocks);
  EXPECT_DEATH(allocator.Release(blocks), "RefCount");
  EXPECT_DEATH(allocator.Retain(blocks[0]), "kept");
  EXPECT_DEATH(allocator.Keep(blocks[0]), "RefCount");
  EXPECT_DEATH(allocator.RefCount(2), "num_blocks");
  EXPECT_DEATH(allocator.Release(std::vector<BlockId>{-1}), "block >= 0");
}

}  // namespace
}  // namespace lockstep
