// Where the rows of a step are cut.
#include "model/row_slices.h"

#include <gtest/gtest.h>

namespace lockstep {
namespace {

// Columns of Qwen2.5-7B.
constexpr int64_t kQkv = (28 + 2 * 4) * 128, kO = 28 * 128, kGateUp = 2 * 18944, kDown = 18944;

TEST(RowSlicesTest, HoldAllRowsWhateverTheirNumber) {
  for (int64_t rows = 2; rows < 3000; rows = rows < 600 ? rows + 1 : rows + 61) {
    for (const auto& [before, after] :
         {std::pair{kO, kGateUp}, {kDown, kQkv}, {int64_t{1}, kO}, {kO, int64_t{1}}, {kO, kO}}) {
      const RowSlices slices = CutRows(rows, before, after);
      ASSERT_EQ(slices.size(), 2) << rows;
      EXPECT_EQ(slices[0].begin, 0);
      EXPECT_EQ(slices[0].end, slices[1].begin);
      EXPECT_EQ(slices[1].end, rows);
      EXPECT_GT(slices[0].size(), 0) << rows;
      EXPECT_GT(slices[1].size(), 0) << rows;
      const int64_t unit = rows >= 2 * kSliceRows ? kSliceRows : 1;
      EXPECT_EQ(slices[0].end % unit, 0) << rows;
    }
  }
}

// sum(0) against before(1), sum(1) against after(0): the same share of both is hidden, but for the
// rounding to whole tiles.
TEST(RowSlicesTest, HideBothSumsAlike) {
  for (const auto& [before, after] : {std::pair{kO, kGateUp}, {kDown, kQkv}, {kO, kO}}) {
    const RowSlices slices = CutRows(int64_t{1} << 20, before, after);
    const double first = static_cast<double>(slices[0].size());
    const double second = static_cast<double>(slices[1].size());
    const double hides_first = second * static_cast<double>(before) / first;
    const double hides_second = first * static_cast<double>(after) / second;
    EXPECT_NEAR(hides_first / hides_second, 1, 1e-2);
  }
  EXPECT_EQ(CutRows(8192, kO, kO)[0], (Range{0, 4096}));
  // Little of o, which has little work to hide the first sum behind, and much of down.
  EXPECT_EQ(CutRows(8192, kO, kGateUp)[0], (Range{0, 1920}));
  EXPECT_EQ(CutRows(8192, kDown, kQkv)[0], (Range{0, 5504}));
}

TEST(RowSlicesTest, RowsOfAViewKeepItsGaps) {
  float numbers[6 * 4] = {};
  const MatrixView m = {numbers, DType::kF32, 6, 3, 4};
  const MatrixView rows = RowsOf(m, {2, 5});
  EXPECT_EQ(rows.data, numbers + 8);
  EXPECT_EQ(rows.rows, 3);
  EXPECT_EQ(rows.cols, 3);
  EXPECT_EQ(rows.stride, 4);
}

}  // namespace
}  // namespace lockstep
