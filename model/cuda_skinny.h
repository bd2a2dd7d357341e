// Products of few rows (skinny GEMMs) on one Hopper GPU, bound by the read of the weights.
//
// The weights' rows are the 64 rows of warpgroup instructions, x the few columns, padded to 8, 16,
// 24 or 32. One block a multiprocessor. W is cut into tiles of 64 rows and these along K into
// chunks of 128 columns, and each block takes an equal share of all chunks, one behind the other,
// wherever tiles begin or end ("stream-K", Osama et al. 2023), so that all end together. Chunks go
// through a ring in shared memory by bulk copies. Sums of a tile that several blocks share go
// through memory in float32; the last block adds them in the order of K, whoever that is: the same
// shapes give the same bits every time.
//
// Where launches are programmatic, a product begins when all blocks of the kernel before it have
// begun, and reads its weights while that one still runs, and even the one before that. So the
// kernels of one stream may not write weights a product reads: those alone are touched before the
// wait for the kernel before (griddepcontrol.wait). Behind that wait x, y, the bias and the sums
// are its own, for the kernel before has ended then, and that one ended no sooner than what it
// waited for: all kernels of a chain of programmatic launches wait (LaunchKernel).
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "runtime/core/buffer.h"
#include "runtime/core/cuda_device.h"
#include "runtime/core/status.h"

namespace lockstep {

// y[T, N] = x[T, K] * weight[N, K]^T (+ bias[N], of y's dtype, may be null). Gated: weight and bias
// are [gate; up], N rows each, and y = silu(gate) * up.
struct SkinnyProduct {
  MatrixView x;
  MatrixView weight;
  const void* bias = nullptr;
  MatrixView y;
  bool gated = false;
};

struct SkinnyLaunch {
  CudaStream stream = nullptr;
  bool programmatic = false;  // see CudaContext::programmatic_launch
  int spare_multiprocessors = 0;
};

// Thread rule: the rank's engine thread. Stream rule: products that may run at the same time may
// not share a CudaSkinny, whose memory for sums they all use.
class CudaSkinny {
 public:
  // T. With more, cuBLASLt's products are as fast or faster (tests/bench/cuda_ops_bench, linear).
  static constexpr int64_t kMaxRows = 32;

  // For the selected device; null where that is no Hopper GPU, or nothing was built for those.
  // Nothing is allocated on the device later.
  static absl::StatusOr<std::unique_ptr<CudaSkinny>> Create(int num_multiprocessors);

  // The products this is for: T up to kMaxRows, bfloat16 or float16 (y may be float32), rows of x
  // and weight that begin at multiples of 16 bytes; gated, N a multiple of 8.
  static bool Takes(const SkinnyProduct& product);

  // Of what it takes. Neither waits nor allocates; may be captured.
  absl::Status Run(const SkinnyProduct& product, const SkinnyLaunch& launch) const;

 private:
  CudaSkinny(int num_multiprocessors, DeviceBuffer parts, DeviceBuffer counters)
      : num_multiprocessors_(num_multiprocessors),
        parts_(std::move(parts)),
        counters_(std::move(counters)) {}

  int num_multiprocessors_;
  DeviceBuffer parts_;
  DeviceBuffer counters_;  // all zero between products
};

}  // namespace lockstep
