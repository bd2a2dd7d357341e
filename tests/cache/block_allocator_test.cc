#include "cache/block_allocator.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>

namespace lockstep {
namespace {

TEST(BlockAllocatorTest, HandsOutEveryBlockOnce) {
  BlockAllocator allocator(5);
  const auto blocks = allocator.Allocate(5);
  ASSERT_TRUE(blocks.ok());
  EXPECT_EQ(std::set<BlockId>(blocks->begin(), blocks->end()), (std::set<BlockId>{0, 1, 2, 3, 4}));
  EXPECT_EQ(allocator.num_free(), 0);
  for (BlockId block : *blocks) EXPECT_EQ(allocator.RefCount(block), 1);
  EXPECT_TRUE(allocator.CheckInvariants().ok());
}

TEST(BlockAllocatorTest, AllocatesAllOrNothing) {
  BlockAllocator allocator(4);
  const auto first = allocator.Allocate(3);
  ASSERT_TRUE(first.ok());
  const auto second = allocator.Allocate(2);
  EXPECT_EQ(second.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(allocator.num_free(), 1);
  EXPECT_TRUE(allocator.CheckInvariants().ok());
  EXPECT_TRUE(allocator.Allocate(1).ok());
  EXPECT_TRUE(allocator.Allocate(0).ok());
}

TEST(BlockAllocatorTest, SharedBlockIsFreedByItsLastOwner) {
  BlockAllocator allocator(2);
  const BlockId block = allocator.Allocate(1)->front();
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
  const auto blocks = *allocator.Allocate(6);
  allocator.Release(std::vector<BlockId>{blocks[4], blocks[1]});
  EXPECT_EQ(*allocator.Allocate(2), (std::vector<BlockId>{blocks[1], blocks[4]}));
}

TEST(BlockAllocatorTest, KeepsItsInvariantsUnderRandomUse) {
  std::mt19937 rng(7);
  BlockAllocator allocator(64);
  std::vector<BlockId> held;  // one entry a reference
  for (int step = 0; step < 5000; ++step) {
    const int action = static_cast<int>(rng() % 3);
    if (action == 0) {
      const int64_t before = allocator.num_free();
      const int64_t count = static_cast<int64_t>(rng() % 8);
      const auto blocks = allocator.Allocate(count);
      ASSERT_EQ(blocks.ok(), count <= before);
      if (blocks.ok()) held.insert(held.end(), blocks->begin(), blocks->end());
      ASSERT_EQ(allocator.num_free(), before - (blocks.ok() ? count : 0));
    } else if (!held.empty()) {
      const size_t i = rng() % held.size();
      if (action == 1 && held.size() < 200) {
        allocator.Retain(held[i]);
        held.push_back(held[i]);
      } else {
        allocator.Release(std::span(&held[i], 1));
        held.erase(held.begin() + static_cast<std::ptrdiff_t>(i));
      }
    }
    ASSERT_TRUE(allocator.CheckInvariants().ok()) << allocator.CheckInvariants();
    for (BlockId block = 0; block < 64; ++block) {
      ASSERT_EQ(allocator.RefCount(block), std::count(held.begin(), held.end(), block));
    }
  }
}

TEST(BlockAllocatorDeathTest, MisuseIsABug) {
  BlockAllocator allocator(2);
  const std::vector<BlockId> blocks = *allocator.Allocate(1);
  allocator.Release(blocks);
  EXPECT_DEATH(allocator.Release(blocks), "RefCount");
  EXPECT_DEATH(allocator.Retain(blocks[0]), "RefCount");
  EXPECT_DEATH(allocator.RefCount(2), "num_blocks");
  EXPECT_DEATH(allocator.Release(std::vector<BlockId>{-1}), "block >= 0");
}

}  // namespace
}  // namespace lockstep
