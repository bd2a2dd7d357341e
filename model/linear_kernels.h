// Inside of Linear: one table of kernels for each instruction set.
#pragma once

#include <cstdint>

#include "model/cpu_isa.h"
#include "runtime/core/dtype.h"
#include "runtime/core/range.h"

namespace lockstep {

// y[t, n] = sum over k of x[t, k] * w[n, k] (+ bias[n]), strides in elements.
struct LinearArgs {
  const void* x = nullptr;  // [rows, depth], float32, or for bfloat16 weights as round_rows left it
  int64_t x_stride = 0;
  const void* weight = nullptr;  // [N, depth]
  int64_t weight_stride = 0;
  const float* bias = nullptr;  // [N] or null
  float* y = nullptr;           // [rows, N]
  int64_t y_stride = 0;
  int64_t rows = 0;
  int64_t depth = 0;  // K
};

struct LinearKernels {
  // Columns [begin, end) of y. Pure: may run on several threads at once.
  void (*f32)(const LinearArgs& args, Range columns);
  void (*bf16)(const LinearArgs& args, Range columns);
  // x rounded to bfloat16, `count` elements, stored as the bf16 kernel wants it.
  void (*round)(const float* x, int64_t count, void* out);
  int64_t rounded_bytes;  // an element of `out`: 2 (bfloat16) or 4 (float32 of the same value)
};

extern const LinearKernels kLinearPortable;
extern const LinearKernels kLinearAvx2;
extern const LinearKernels kLinearAvx512;
extern const LinearKernels kLinearAvx512Bf16;

}  // namespace lockstep
