// The operators of the decoder on one GPU: those of ops.h beside which they stand, and with the
// same meaning, for matrices in device memory.
//
// Matrices are row-major in device memory, with or without gaps between rows, all of one call in
// the same dtype: float32, bfloat16 or float16 (exceptions are stated). Arithmetic is float32, each
// result is rounded once. Norm weights are float32 arrays. Pointers without a type of their own
// matrix (ids, rows, weights, cosines) are device memory, too.
//
// Every function launches on context.stream, neither waits nor allocates, and may be captured in a
// graph. T may be 0. A row of the result depends on its own row of the input alone, bit for bit.
// Shapes are the caller's duty (LOCKSTEP_CHECK); the status is that of the launch.
#pragma once

#include <cstdint>

#include "cache/kv_view.h"
#include "model/cuda_linear.h"
#include "runtime/core/buffer.h"
#include "runtime/core/cuda_device.h"
#include "runtime/core/range.h"
#include "runtime/core/status.h"

namespace lockstep {

// What operators need besides their operands. Passed, never global.
struct CudaContext {
  CudaStream stream = nullptr;
  int num_multiprocessors = 0;
  CudaLinear& linear;
  // Kernels start while the one before them in the stream ends, and wait for its results themselves
  // (programmatic dependent launch): only what never changes, the weights, is read before that.
  bool programmatic_launch = false;
  // Products leave so many multiprocessors to what runs on another stream.
  int spare_multiprocessors = 0;
};

// y[T, N] = x[T, K] * weight[N, K]^T (+ bias[N], of y's dtype, may be null): see CudaLinear::Run.
// y may be float32 whatever x and weight are.
inline absl::Status Linear(const MatrixView& x, const MatrixView& weight, const void* bias,
                           const MatrixView& y, const CudaContext& context) {
  return context.linear.Run(x, weight, bias, y, context.stream, context.spare_multiprocessors,
                            context.programmatic_launch);
}

// Linear and SiluMul as one product, see CudaLinear::RunSwiGlu; where TakesSwiGlu.
inline absl::Status LinearSwiGlu(const MatrixView& x, const MatrixView& weight, const void* bias,
                                 const MatrixView& out, const CudaContext& context) {
  return context.linear.RunSwiGlu(x, weight, bias, out, context.stream,
                                  context.spare_multiprocessors, context.programmatic_launch);
}

// out[t] = table[ids[t] - vocab.begin] where ids[t] is in `vocab`, else zeros. ids int32 [T], table
// [vocab.size(), E], out [T, E].
absl::Status GatherRows(const int32_t* ids, Range vocab, const MatrixView& table,
                        const MatrixView& out, const CudaContext& context);

// out = x / sqrt(mean(x^2) + eps) * weight, row by row. x, out: [T, E], may be the same; weight
// float32 [E].
absl::Status RmsNorm(const MatrixView& x, const float* weight, float eps, const MatrixView& out,
                     const CudaContext& context);

// residual += delta, rounded to its dtype; then out = RmsNorm(residual). All [T, E]; out may be
// delta.
absl::Status AddRmsNorm(const MatrixView& residual, const MatrixView& delta, const float* weight,
                        float eps, const MatrixView& out, const CudaContext& context);

// out[r] = RmsNorm(residual[rows[r]] + delta[rows[r]]), the sum rounded as above; residual and
// delta stay. rows int32 [R], out [R, E], no part of residual or delta.
absl::Status AddRmsNormRows(const MatrixView& residual, const MatrixView& delta,
                            const int32_t* rows, const float* weight, float eps,
                            const MatrixView& out, const CudaContext& context);

// RMSNorm of each head of queries and keys; weights float32 [D], null: none.
struct HeadNorm {
  const float* q_weight = nullptr;
  const float* k_weight = nullptr;
  float eps = 0;
};

// Angles of RotaryEmbedding::FillCosSin: cos, sin float32 [anything, R/2]. Token t takes row
// rows[t]; row t where `rows` is null. So a table by position goes with the positions, and the
// angles of a step's tokens go with null.
struct RopeTable {
  const float* cos = nullptr;
  const float* sin = nullptr;
  const int32_t* rows = nullptr;
  int64_t rotary_dim = 0;  // R: even, at most D; 0: nothing turns
};

// qkv [T, (Hq + 2 * Hkv) * D] = [q; k; v] before attention. Each head of queries and keys is
// normed, then its first R dims turn, pair i being (x[i], x[i + R/2]). Queries stay in place; keys
// and values go to slot slots[t] (int64 [T]) of the cache, which gives Hkv and D and may have
// another dtype; to an fp8 cache divided by its scales. One rounding at the end. kNoSlot writes
// neither key nor value; columns of keys and values in qkv stay as they were. D any, R even.
absl::Status NormRopeWriteKv(const MatrixView& qkv, int64_t num_query_heads, const HeadNorm& norm,
                             const RopeTable& rope, const int64_t* slots, const KvCacheView& cache,
                             const CudaContext& context);

// out[T, F] = silu(gate) * up, where gate_up [T, 2F] is [gate, up].
absl::Status SiluMul(const MatrixView& gate_up, const MatrixView& out, const CudaContext& context);

}  // namespace lockstep
