// Products of a single row, with the operators around them: the decode step of one request.
//
// Such a step is bound by the read of the weights, and what stands between two products (a norm, a
// bias, SwiGLU, the residual addition) costs more as a kernel of its own than the work it does. So
// the norm before a product and what follows it are part of it.
#pragma once

#include <cstdint>

#include "runtime/core/buffer.h"
#include "runtime/core/cuda_device.h"
#include "runtime/core/status.h"

namespace lockstep {

// What becomes of the product p[N] (float32, the bias added).
enum class GemvOutput {
  kStore,   // y = p
  kAdd,     // y = y + p, rounded once
  kSwiGlu,  // weight is [gate; up], [2F, K]: y[F] = silu(p[0, F)) * p[F, 2F), rounded once
};

struct GemvOperands {
  MatrixView x = {};  // [1, K]
  // float32 [K]: the product takes RmsNorm(x, norm_weight), rounded to x's dtype. Null: x.
  const float* norm_weight = nullptr;
  float norm_eps = 0;
  MatrixView weight = {};      // [N, K], rows without gaps
  const void* bias = nullptr;  // [N] of y's dtype, or null
  GemvOutput output = GemvOutput::kStore;
  MatrixView y = {};  // [1, N], or [1, F]
};

class Gemv {
 public:
  // For the selected device: allows the kernels their shared memory.
  static absl::StatusOr<Gemv> Create(int num_multiprocessors);

  // x and weight both bfloat16 or both float16, K a multiple of 8 up to 28672, x and weight aligned
  // to 16 bytes. y of their dtype; where it is stored, float32, too.
  static bool Supports(const GemvOperands& operands);

  // Of operands that Supports takes (LOCKSTEP_CHECK). Sums are float32 in an order that K alone
  // decides. Launches on `stream`; see CudaContext about programmatic_launch. The status is that of
  // the launch.
  absl::Status Run(const GemvOperands& operands, CudaStream stream, bool programmatic_launch) const;

 private:
  Gemv() = default;

  int num_multiprocessors_ = 0;
};

}  // namespace lockstep
