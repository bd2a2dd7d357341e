// Products of few rows, at the speed at which the weights can be read: the decode steps of small
// batches.
#pragma once

#include <cstdint>

#include "runtime/core/buffer.h"
#include "runtime/core/cuda_device.h"
#include "runtime/core/status.h"

namespace lockstep {

// How the weights travel; the defaults are the best that was measured (tests/bench/cuda_ops_bench).
struct SkinnyTuning {
  // Of a block. Two blocks of 112 KB fit a multiprocessor, so the next kernel begins while one
  // ends; at most 224.
  int shared_kib = 112;
  int stage_cols = 0;  // 256 or 512; 0: by the size of a stage
  int max_tile_rows = 32;
  int l2_promotion_bytes = 256;  // what L2 fetches at least: 0, 64, 128 or 256
};

class SkinnyLinear {
 public:
  static constexpr int64_t kMaxRows = 16;

  // For the selected device, once it is selected: asks the driver for what encodes tensor maps, and
  // allows the kernels their shared memory.
  static absl::StatusOr<SkinnyLinear> Create(int num_multiprocessors);

  // 0 < T <= 16; x and weight bfloat16 or float16, rows that start at multiples of 16 bytes, K a
  // multiple of 8; y of their dtype or float32.
  static bool Supports(const MatrixView& x, const MatrixView& weight, const MatrixView& y);

  // y[T, N] = x[T, K] * weight[N, K]^T (+ bias[N], of y's dtype, may be null), of what Supports
  // takes.
  //
  // Sums are float32 in an order that K alone decides: a row's bits depend neither on T nor on the
  // other rows, nor on the device's size.
  //
  // Launches on `stream`; see CudaContext about programmatic_launch.
  absl::Status Run(const MatrixView& x, const MatrixView& weight, const void* bias,
                   const MatrixView& y, CudaStream stream, bool programmatic_launch,
                   const SkinnyTuning& tuning = {}) const;

 private:
  SkinnyLinear() = default;

  int num_multiprocessors_ = 0;
  void* encode_ = nullptr;  // cuTensorMapEncodeTiled
};

}  // namespace lockstep
