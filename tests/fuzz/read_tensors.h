// What the loader does with an opened checkpoint, for fuzzing.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "model/checkpoint/checkpoint.h"

namespace lockstep {

// Reads a rectangle into memory of exactly its size, so that a byte too much is seen.
inline absl::Status ReadRectangle(const Checkpoint& checkpoint, const std::string& name, Range rows,
                                  Range cols, DType dtype, int64_t padding) {
  const int64_t stride = cols.size() + padding;
  const int64_t used = rows.size() == 0 ? 0 : (rows.size() - 1) * stride + cols.size();
  std::vector<char> bytes(static_cast<size_t>(used * SizeOf(dtype)));
  return checkpoint.Read(name, rows, cols, {bytes.data(), dtype, rows.size(), cols.size(), stride});
}

// Every tensor: the whole of it and a part, in every dtype. An error is no fault here; a crash is.
inline void ReadTensors(const Checkpoint& checkpoint) {
  constexpr int64_t kMaxElements = 1 << 16;  // of a rectangle: keeps an input fast
  for (const std::string& name : checkpoint.Names()) {
    const TensorInfo* info = checkpoint.Find(name);
    LOCKSTEP_CHECK(info != nullptr && !info->shape.empty());
    if (!info->readable || info->shape.size() > 2) {
      LOCKSTEP_CHECK(!ReadRectangle(checkpoint, name, {0, 0}, {0, 0}, DType::kF32, 0).ok());
      continue;
    }
    const int64_t cols = std::min(info->cols(), kMaxElements);
    const int64_t rows = std::min(info->rows(), kMaxElements / std::max<int64_t>(cols, 1));
    for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
      (void)ReadRectangle(checkpoint, name, {0, rows}, {0, cols}, dtype, 0);
      (void)ReadRectangle(checkpoint, name, {info->rows() - rows / 2, info->rows()},
                          {info->cols() - (cols + 1) / 3, info->cols()}, dtype, 3);
    }
  }
}

}  // namespace lockstep
