// Products of activations and weights on one GPU: those CudaSkinny takes by it (cuda_skinny.h), all
// others by cuBLASLt.
//
// Products are added in float32; float32 operands are not rounded to TF32, and partial sums of a
// product that is split along K are kept in float32. Unlike on the CPU, a row's bits may depend on
// T: another number of rows may be another algorithm. The same shapes, T among them, give the same
// bits every time.
//
// Thread rule: the rank's engine thread. Stream rule: products that may run at the same time may
// not share a CudaLinear, whose workspace they all use: one stream a CudaLinear.
#pragma once

#include <cstdint>
#include <memory>

#include "runtime/core/buffer.h"
#include "runtime/core/cuda_device.h"
#include "runtime/core/range.h"
#include "runtime/core/status.h"

namespace lockstep {

class CudaLinear {
 public:
  static constexpr int64_t kDefaultWorkspaceBytes = int64_t{64} << 20;

  // For the selected device. Allocates the workspace; nothing is allocated on the device later.
  // Without has_skinny cuBLASLt makes all products.
  static absl::StatusOr<std::unique_ptr<CudaLinear>> Create(
      int64_t workspace_bytes = kDefaultWorkspaceBytes, bool has_skinny = true);
  ~CudaLinear();
  CudaLinear(const CudaLinear&) = delete;
  CudaLinear& operator=(const CudaLinear&) = delete;

  // y[T, N] = x[T, K] * weight[N, K]^T (+ bias[N], of y's dtype, may be null). x and weight: one of
  // float32, bfloat16, float16; y: the same or float32. Rows of each without gaps or with.
  //
  // Launches on `stream`; neither waits nor allocates device memory. May be captured in a graph
  // when a product of this shape ran before. InvalidArgument when cuBLASLt has no algorithm.
  //
  // cuBLASLt's large products occupy every multiprocessor from their first tile to their last: what
  // another stream wants to run at the same time waits for them, or makes some of their blocks wait
  // for it, and the whole product with those. So beside other work a product leaves it
  // `spare_multiprocessors` (all but one at most).
  //
  // With `programmatic`, a product of few rows starts while the kernel before it ends (see
  // CudaContext::programmatic_launch).
  absl::Status Run(const MatrixView& x, const MatrixView& weight, const void* bias,
                   const MatrixView& y, CudaStream stream, int spare_multiprocessors = 0,
                   bool programmatic = false);

  // y[T, F] = silu(gate) * up, where [gate, up] = x[T, K] * weight[2F, K]^T (+ bias[2F]), rounded
  // once. As Run; only where TakesSwiGlu.
  bool TakesSwiGlu(const MatrixView& x, const MatrixView& weight, const MatrixView& y) const;
  absl::Status RunSwiGlu(const MatrixView& x, const MatrixView& weight, const void* bias,
                         const MatrixView& y, CudaStream stream, int spare_multiprocessors = 0,
                         bool programmatic = false);

 private:
  class Impl;
  explicit CudaLinear(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace lockstep
