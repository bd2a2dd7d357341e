#include "model/row_slices.h"

#include <algorithm>
#include <cmath>

namespace lockstep {

RowSlices CutRows(int64_t num_rows, int64_t before, int64_t after) {
  LOCKSTEP_CHECK(num_rows >= 2 && before > 0 && after > 0);
  // The same on all ranks: IEEE 754 rounds quotients and roots correctly, everywhere alike.
  const double ratio = std::sqrt(static_cast<double>(after) / static_cast<double>(before));
  const double share = 1.0 / (1.0 + ratio);
  const int64_t unit = num_rows >= 2 * kSliceRows ? kSliceRows : 1;
  const double units = static_cast<double>(num_rows) * share / static_cast<double>(unit);
  const int64_t cut = static_cast<int64_t>(std::llround(units)) * unit;
  const int64_t largest = (num_rows - 1) / unit * unit;
  const int64_t first = std::clamp(cut, unit, largest);
  return {{0, first}, {first, num_rows}};
}

MatrixView RowsOf(const MatrixView& m, Range rows) {
  LOCKSTEP_CHECK(rows.begin >= 0 && rows.begin <= rows.end && rows.end <= m.rows);
  MatrixView part = m;
  part.data = static_cast<char*>(m.data) + rows.begin * m.stride * SizeOf(m.dtype);
  part.rows = rows.size();
  return part;
}

}  // namespace lockstep
