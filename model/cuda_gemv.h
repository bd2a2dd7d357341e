// Products of few rows, at the speed at which the weights can be read: the decode steps of small
// batches.
#pragma once

#include <cstdint>

#include "runtime/core/buffer.h"
#include "runtime/core/cuda_device.h"
#include "runtime/core/status.h"

namespace lockstep {

inline constexpr int64_t kMaxSkinnyRows = 16;

// y[T, N] = x[T, K] * weight[N, K]^T (+ bias[N], of y's dtype, may be null). 0 < T <= 16, K a
// multiple of 32, x and weight bfloat16 or float16 with rows that start at multiples of 16 bytes, y
// of their dtype or float32.
//
// Sums are float32 in an order that K alone decides: a row's bits depend neither on T nor on the
// other rows, nor on the device's size.
bool SkinnyLinearSupports(const MatrixView& x, const MatrixView& weight, const MatrixView& y);

// Once a device, before SkinnyLinear: allows the kernels their shared memory.
absl::Status PrepareSkinnyLinear();

// Launches on `stream`; see CudaContext about programmatic_launch.
absl::Status SkinnyLinear(const MatrixView& x, const MatrixView& weight, const void* bias,
                          const MatrixView& y, int num_multiprocessors, CudaStream stream,
                          bool programmatic_launch);

}  // namespace lockstep
