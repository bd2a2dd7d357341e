// Inside of ops.cc: one table of kernels for each instruction set.
#pragma once

#include <cstdint>

#include "model/cpu_isa.h"
#include "runtime/core/dtype.h"
#include "runtime/core/range.h"

namespace lockstep {

// y[t, n] = sum over k of x[t, k] * w[n, k] (+ bias[n]).
struct LinearArgs {
  // [rows, K] float32 for float32 weights. For bfloat16 weights as `round` left it, K rounded up to
  // an even number, the element added zero.
  const void* x = nullptr;
  int64_t x_stride = 0;          // elements
  const void* weight = nullptr;  // packed, see linear_packing.h
  const float* bias = nullptr;   // [N] or null
  float* y = nullptr;            // [rows, N]
  int64_t y_stride = 0;          // elements
  int64_t steps = 0;             // of K
};

// Rows of a unit of work: their part of x (96 x 2048 bfloat16: 384 KB) stays in L2 while the panels
// stream by.
inline constexpr int64_t kLinearRowBlock = 96;

struct LinearKernel {
  // A part of y: rows of one range (at most kLinearRowBlock), columns of another, which starts at a
  // whole panel. Pure: may run on several threads at once.
  void (*run)(const LinearArgs& args, Range rows, Range columns);
  // Columns that are computed together when there are `rows` rows: the best multiple to cut at.
  int64_t (*columns_at_once)(int64_t rows);
};

struct LinearKernels {
  LinearKernel f32;
  LinearKernel bf16;
  // x rounded to bfloat16, `count` elements, stored as the bf16 kernel wants it.
  void (*round)(const float* x, int64_t count, void* out);
  int64_t rounded_bytes;  // an element of `out`: 2 (bfloat16) or 4 (float32 of the same value)
  // out[i] = silu(gate[i]) * up[i], the same bits wherever i is; relative error below 1e-6.
  void (*silu_mul)(const float* gate, const float* up, int64_t count, float* out);
};

extern const LinearKernels kLinearPortable;
extern const LinearKernels kLinearAvx2;
extern const LinearKernels kLinearAvx512;
extern const LinearKernels kLinearAvx512Bf16;

}  // namespace lockstep
