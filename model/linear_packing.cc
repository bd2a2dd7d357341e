#include "model/linear_packing.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "runtime/core/status.h"

namespace lockstep {

namespace {

int64_t StepElements(DType dtype) { return dtype == DType::kF32 ? 1 : 2; }

// lines[s][c] = rows[c][s], 16 x 16 words at a time: both sides of a block stay in L1.
void TransposePanel(const uint32_t* rows, int64_t steps, uint32_t* lines) {
  for (int64_t begin = 0; begin < steps; begin += kPanelColumns) {
    const int64_t end = std::min(steps, begin + kPanelColumns);
    for (int64_t c = 0; c < kPanelColumns; ++c) {
      for (int64_t s = begin; s < end; ++s) lines[s * kPanelColumns + c] = rows[c * steps + s];
    }
  }
}

}  // namespace

int64_t PackedSteps(int64_t cols, DType dtype) {
  LOCKSTEP_CHECK(dtype != DType::kF16);
  return (cols + StepElements(dtype) - 1) / StepElements(dtype);
}

int64_t PackedBytes(int64_t rows, int64_t cols, DType dtype) {
  const int64_t panels = (rows + kPanelColumns - 1) / kPanelColumns;
  return panels * PackedSteps(cols, dtype) * kLineBytes;
}

PackedMatrix PackInPlace(const Buffer& storage, DType dtype, int64_t rows, int64_t cols) {
  LOCKSTEP_CHECK(storage.size_bytes() >= PackedBytes(rows, cols, dtype));
  const int64_t steps = PackedSteps(cols, dtype);
  const int64_t row_bytes = cols * SizeOf(dtype);
  std::vector<uint32_t> panel(kPanelColumns * steps);
  // The last panel first: a panel of the result may reach into the source of the next one.
  for (int64_t p = (rows + kPanelColumns - 1) / kPanelColumns - 1; p >= 0; --p) {
    const int64_t first = p * kPanelColumns;
    const int64_t count = std::min(kPanelColumns, rows - first);
    std::fill(panel.begin(), panel.end(), 0);
    for (int64_t c = 0; c < count; ++c) {
      std::memcpy(panel.data() + c * steps, storage.as<char>() + (first + c) * row_bytes,
                  row_bytes);
    }
    TransposePanel(panel.data(), steps, storage.as<uint32_t>() + first * steps);
  }
  return {storage.data(), dtype, rows, cols};
}

void UnpackRow(const PackedMatrix& matrix, int64_t row, float* out) {
  const int64_t steps = PackedSteps(matrix.cols, matrix.dtype);
  const uint32_t* word = static_cast<const uint32_t*>(matrix.data) +
                         row / kPanelColumns * steps * kPanelColumns + row % kPanelColumns;
  if (matrix.dtype == DType::kF32) {
    for (int64_t k = 0; k < matrix.cols; ++k) std::memcpy(out + k, word + k * kPanelColumns, 4);
    return;
  }
  for (int64_t k = 0; k < matrix.cols; ++k) {
    BF16 value;
    std::memcpy(&value, reinterpret_cast<const char*>(word + k / 2 * kPanelColumns) + k % 2 * 2, 2);
    out[k] = ToFloat(value);
  }
}

}  // namespace lockstep
