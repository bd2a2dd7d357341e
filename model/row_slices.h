// The rows of a step in slices: what is summed over ranks at once.
//
// A row-parallel product, the sum over ranks of its result, and the product of the normed sum:
//
//   products  before(0)  before(1)  after(0)  after(1)
//   sums                 sum(0)     sum(1)
//
// Cut into two slices, the sum of each runs beside a product of the other one.
#pragma once

#include <cstdint>

#include "absl/container/inlined_vector.h"
#include "runtime/core/buffer.h"
#include "runtime/core/range.h"

namespace lockstep {

// One behind the other, none of them empty; together all rows.
using RowSlices = absl::InlinedVector<Range, 2>;

// Two slices of `num_rows` (at least 2) rows. before, after: work of the two products on a row, in
// the same unit. Where there are enough rows, a slice begins at a multiple of kSliceRows.
//
// With a share a of the rows in slice 0, sum(0) is longer than before(1) by a factor proportional
// to a / ((1 - a) * before), and sum(1) than after(0) by (1 - a) / (a * after). Both are equally
// well hidden where a / (1 - a) = sqrt(before / after), whatever a sum takes. And no product beside
// a sum, which gets fewer multiprocessors than the others, is longer than it needs to be.
RowSlices CutRows(int64_t num_rows, int64_t before, int64_t after);

// Rows of a tile of large products: a slice of whole tiles leaves no multiprocessor half a tile.
inline constexpr int64_t kSliceRows = 128;

// The rows `rows` of m.
MatrixView RowsOf(const MatrixView& m, Range rows);

}  // namespace lockstep
