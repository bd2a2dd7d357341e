#include "cache/block_table.h"

#include <gtest/gtest.h>

namespace lockstep {
namespace {

TEST(BlockTableTest, CountsBlocks) {
  EXPECT_EQ(BlocksForTokens(0, 16), 0);
  EXPECT_EQ(BlocksForTokens(1, 16), 1);
  EXPECT_EQ(BlocksForTokens(16, 16), 1);
  EXPECT_EQ(BlocksForTokens(17, 16), 2);
  EXPECT_EQ(BlocksForTokens(5, 1), 5);
}

TEST(BlockTableTest, FollowsTheTable) {
  const std::vector<BlockId> table = {3, 1};
  std::vector<int64_t> slots(6, -7);
  FillSlotMapping(table, 4, 0, 6, slots.data());
  EXPECT_EQ(slots, (std::vector<int64_t>{12, 13, 14, 15, 4, 5}));
}

TEST(BlockTableTest, StartsInTheMiddleAndWritesNoMore) {
  const std::vector<BlockId> table = {3, 1, 9};
  std::vector<int64_t> slots(5, -7);
  FillSlotMapping(table, 4, 3, 3, slots.data() + 1);
  EXPECT_EQ(slots, (std::vector<int64_t>{-7, 15, 4, 5, -7}));
  FillSlotMapping(table, 4, 12, 0, slots.data());
  EXPECT_EQ(slots[0], -7);
}

TEST(BlockTableTest, SlotsPass32Bits) {
  const std::vector<BlockId> table = {2000000000};
  int64_t slot = 0;
  FillSlotMapping(table, 16, 5, 1, &slot);
  EXPECT_EQ(slot, int64_t{2000000000} * 16 + 5);
}

TEST(BlockTableDeathTest, ShortTableIsABug) {
  const std::vector<BlockId> table = {3, 1};
  std::vector<int64_t> slots(9);
  EXPECT_DEATH(FillSlotMapping(table, 4, 0, 9, slots.data()), "BlocksForTokens");
}

}  // namespace
}  // namespace lockstep
