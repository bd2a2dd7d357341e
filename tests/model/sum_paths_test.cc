// Which path a sum over ranks takes; see cuda_sum.h.
#include <vector>

#include "gtest/gtest.h"
#include "model/cuda_sum.h"

namespace lockstep {
namespace {

TEST(SumPathsTest, OneShotForFewBytesThenTwoShotThenNccl) {
  const SumPaths paths = {.one_shot_bytes = 100, .two_shot_bytes = 1000};
  EXPECT_EQ(paths.Of(0), SumPath::kOneShot);
  EXPECT_EQ(paths.Of(100), SumPath::kOneShot);
  EXPECT_EQ(paths.Of(101), SumPath::kTwoShot);
  EXPECT_EQ(paths.Of(1000), SumPath::kTwoShot);
  EXPECT_EQ(paths.Of(1001), SumPath::kNccl);
}

// One-shot traffic grows with the ranks, and nothing goes where there is no window for it.
TEST(SumPathsTest, MoreRanksTakeTwoShotEarlierAndNobodyExceedsTheWindow) {
  for (const int64_t window : {int64_t{16}, int64_t{100} << 10, int64_t{64} << 20}) {
    int64_t fewer = window;
    for (int ranks = 1; ranks <= kMaxPeers; ++ranks) {
      const SumPaths paths = ChooseSumPaths(ranks, window);
      EXPECT_LE(paths.one_shot_bytes, fewer) << ranks << " ranks";
      EXPECT_GT(paths.one_shot_bytes, 0) << ranks << " ranks";
      EXPECT_LE(paths.one_shot_bytes, paths.two_shot_bytes) << ranks << " ranks";
      EXPECT_EQ(paths.two_shot_bytes, window) << ranks << " ranks";
      fewer = paths.one_shot_bytes;
    }
  }
  // 8 rows of 3584 bfloat16, a small decode step, are one-shot on any number of ranks.
  EXPECT_EQ(ChooseSumPaths(kMaxPeers, 64 << 20).Of(8 * 3584 * 2), SumPath::kOneShot);
}

TEST(SumPathsTest, WindowsHoldTheLargestStepUpToALimit) {
  EXPECT_EQ(SumWindowBytes(7168), 7168);
  EXPECT_EQ(SumWindowBytes(int64_t{8192} * 3584 * 2), int64_t{8192} * 3584 * 2);
  EXPECT_EQ(SumWindowBytes(int64_t{1} << 40), kMaxSumWindowBytes);
}

// The grid of a two-shot sum counts on it.
TEST(SumPathsTest, AnyPieceIsDealtEvenly) {
  for (const Range rows : {Range{0, 0}, {0, 1}, {0, 7}, {5, 8}, {101, 8292}}) {
    for (int ranks = 1; ranks <= kMaxPeers; ++ranks) {
      std::vector<int64_t> dealt(ranks);
      for (int64_t row = rows.begin; row < rows.end; ++row) ++dealt.at(RankOfSumRow(row, ranks));
      for (const int64_t count : dealt) {
        EXPECT_GE(count, rows.size() / ranks);
        EXPECT_LE(count, (rows.size() + ranks - 1) / ranks);
      }
    }
  }
}

// Sums that follow each other, also from a step to the next, do not share a window; see
// peer_windows.h.
TEST(SumPathsTest, NeighboursHaveDifferentWindows) {
  for (const int64_t layers : {1, 2, 5}) {
    for (int64_t sum = 0; sum <= 2 * layers; ++sum) {
      const int64_t next = sum == 2 * layers ? 0 : sum + 1;
      EXPECT_NE(WindowOfSum(sum, layers), WindowOfSum(next, layers));
      EXPECT_LT(WindowOfSum(sum, layers), PeerWindows::kNumWindows);
    }
    EXPECT_NE(WindowOfSum(2 * layers, layers), kWindowOfWantedRows);
  }
}

}  // namespace
}  // namespace lockstep
