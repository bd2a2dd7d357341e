// Products of activations and weights on one GPU, by cuBLASLt.
//
// Products are added in float32; float32 operands are not rounded to TF32, and partial sums of a
// product that is split along K are kept in float32. Unlike on the CPU, a row's bits may depend on
// T: cuBLASLt chooses another algorithm for another number of rows. The same shapes, T among them,
// give the same bits every time.
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

// A product without its operands. x, weight: `dtype`; y: `dtype` or float32.
struct LinearShape {
  int64_t rows = 0;  // T
  int64_t n = 0;     // columns of y
  int64_t k = 0;     // columns of x
  DType dtype = DType::kBF16;
  DType out_dtype = DType::kBF16;
  bool has_bias = false;
};

class CudaLinear {
 public:
  static constexpr int64_t kDefaultWorkspaceBytes = int64_t{64} << 20;

  // For the selected device. Allocates the workspace; nothing is allocated on the device later.
  static absl::StatusOr<std::unique_ptr<CudaLinear>> Create(
      int64_t workspace_bytes = kDefaultWorkspaceBytes);
  ~CudaLinear();
  CudaLinear(const CudaLinear&) = delete;
  CudaLinear& operator=(const CudaLinear&) = delete;

  // Chooses the algorithm and loads the kernel by running the product once on uninitialised memory
  // of its own, and waits for it: before graph capture and before serving. Operands of Run must
  // then be aligned to 16 bytes, rows too, or be chosen for anew. Allocates for the time of the
  // call.
  absl::Status Prepare(const LinearShape& shape, CudaStream stream);

  // y[T, N] = x[T, K] * weight[N, K]^T (+ bias[N], of y's dtype, may be null). x and weight: one of
  // float32, bfloat16, float16; y: the same or float32. Rows of each without gaps or with.
  //
  // Launches on `stream`; neither waits nor allocates device memory. May be captured in a graph
  // when a product of this shape ran before. InvalidArgument when cuBLASLt has no algorithm.
  absl::Status Run(const MatrixView& x, const MatrixView& weight, const void* bias,
                   const MatrixView& y, CudaStream stream);

 private:
  class Impl;
  explicit CudaLinear(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace lockstep
