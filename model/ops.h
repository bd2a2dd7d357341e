// The operators of the decoder on the host. Matrices are row-major; activations are float32.
//
// Every result depends on its own row of the input (and the weights) alone: its bits are the same
// whatever T is, wherever the row stands in the batch and however many threads work. Linear keeps
// that rule by adding the products of an output element in one fixed order (linear_tile.h), on
// which the CPU's instruction set has an influence, but nothing else has.
//
// Called from the rank's engine thread; the work is spread over `threads`. Nothing is allocated.
// Shapes are the caller's duty (LOCKSTEP_CHECK).
#pragma once

#include <cstdint>
#include <span>

#include "model/cpu_isa.h"
#include "model/linear_packing.h"
#include "runtime/core/buffer.h"
#include "runtime/core/range.h"
#include "runtime/core/thread_pool.h"

namespace lockstep {

// What operators need besides their operands. Passed, never global.
struct OpContext {
  ThreadPool& threads;
  const Buffer& workspace;  // at least the LinearWorkspaceBytes of every product
  CpuIsa isa = BestCpuIsa();
};

// Scratch memory for a product of T rows of K elements.
int64_t LinearWorkspaceBytes(int64_t rows, int64_t cols, DType weight_dtype, CpuIsa isa);

// y[T, N] = x[T, K] * weight[N, K]^T (+ bias[N], may be null). weight: packed float32 or bfloat16,
// in which case x is rounded to bfloat16 (nearest-even) first, on every instruction set and for
// every T; products are added in float32.
void Linear(const MatrixView& x, const PackedMatrix& weight, const float* bias, const MatrixView& y,
            const OpContext& context);

// out[t] = table[ids[t] - vocab.begin] as float32 where ids[t] is in `vocab`, else zeros. table is
// packed, as the head's weight that it may be, [vocab.size(), E]; out [T, E].
void GatherRows(std::span<const int32_t> ids, Range vocab, const PackedMatrix& table,
                const MatrixView& out, const OpContext& context);

// out = x / sqrt(mean(x^2) + eps) * weight, row by row. x, out: [T, E], may be the same; weight
// [E]. RMSNorm, arXiv:1910.07467; the mean of squares is taken in double.
void RmsNorm(const MatrixView& x, const float* weight, float eps, const MatrixView& out,
             const OpContext& context);

// residual += delta, then out = RmsNorm(residual). All [T, E].
void AddRmsNorm(const MatrixView& residual, const MatrixView& delta, const float* weight, float eps,
                const MatrixView& out, const OpContext& context);

// out[r] = RmsNorm(residual[rows[r]] + delta[rows[r]]); residual and delta stay. out [R, E].
void AddRmsNormRows(const MatrixView& residual, const MatrixView& delta,
                    std::span<const int32_t> rows, const float* weight, float eps,
                    const MatrixView& out, const OpContext& context);

// RMSNorm of each head of D dims of x [T, H * D], in place, with one weight [D] for all heads.
void RmsNormHeads(const MatrixView& x, int64_t head_dim, const float* weight, float eps,
                  const OpContext& context);

// Turns the first R dims of each head of x [T, H * D] in place. cos, sin: [T, R/2], see rope.h.
void ApplyRope(const MatrixView& x, int64_t head_dim, int64_t rotary_dim, const float* cos,
               const float* sin, const OpContext& context);

// out[T, F] = silu(gate) * up, where gate_up [T, 2F] is [gate, up]; silu(x) = x / (1 + exp(-x)).
void SiluMul(const MatrixView& gate_up, const MatrixView& out, const OpContext& context);

}  // namespace lockstep
