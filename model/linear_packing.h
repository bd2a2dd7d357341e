// The layout that Linear (ops.h) reads weights in: made once, when they are loaded, so that a
// step's product reads memory in order, whether for 1 row or for 512, and needs no sum across the
// lanes of a vector.
//
// weight [N, K] is cut into panels of 16 columns of the product (16 rows of the matrix). A panel is
// a sequence of 64-byte lines, one for each step of K; word c of a line belongs to the panel's
// column c:
//   float32   a step is one k:  line s = weight[16p + 0 .. 16p + 15][s]
//   bfloat16  a step is two k:  word c = the pair weight[16p + c][2s, 2s + 1]
// N is rounded up to whole panels and K to whole steps; what is added is zero. Every instruction
// set reads the same layout.
#pragma once

#include <cstdint>

#include "runtime/core/buffer.h"

namespace lockstep {

inline constexpr int64_t kPanelColumns = 16;
inline constexpr int64_t kLineBytes = 64;

// A weight in that layout, which someone else owns.
struct PackedMatrix {
  const void* data = nullptr;
  DType dtype = DType::kF32;  // float32 or bfloat16
  int64_t rows = 0;           // N
  int64_t cols = 0;           // K
};

// Steps of K: K, or half of it rounded up.
int64_t PackedSteps(int64_t cols, DType dtype);
// Memory of a packed [rows, cols] matrix: at most 15 rows and one column more than the plain one.
int64_t PackedBytes(int64_t rows, int64_t cols, DType dtype);

// Turns a row-major matrix without gaps, which lies at the beginning of `storage` (PackedBytes or
// more), into the packed layout in place. Scratch memory: one panel.
PackedMatrix PackInPlace(const Buffer& storage, DType dtype, int64_t rows, int64_t cols);

// Row `row` of the matrix as float32, out [cols].
void UnpackRow(const PackedMatrix& matrix, int64_t row, float* out);

}  // namespace lockstep
