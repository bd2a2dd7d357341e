// The sum over ranks after a row-parallel product, with the residual addition and the norm that
// follow, in one kernel. For the few rows of decode steps, where a collective of its own, and the
// launch after it, cost more than the sum.
#pragma once

#include <cstdint>

#include "model/cuda_ops.h"
#include "parallel/peer_windows.h"

namespace lockstep {

// The window of sum number `sum` of a step of L layers, which has 2L + 1: of the embedding, and in
// each layer of o and of down. They alternate; the last takes the third, because the next step
// begins with the first.
inline int WindowOfSum(int64_t sum, int64_t num_layers) {
  return sum == 2 * num_layers ? 2 : static_cast<int>(sum % 2);
}

// Whether SumAddRmsNorm takes rows of this width and type: 16-byte vectors, at most 2048 a row.
bool SumAddRmsNormSupports(int64_t cols, DType dtype);

// What becomes of the sum over ranks, a row of which is `sum`.
enum class ResidualUse {
  kAdd,      // residual += sum
  kReplace,  // residual = sum: the embedding, which begins the residual stream
};

// COLLECTIVE over the ranks of `peers`, under the rules of peer_windows.h. Each rank's window
// number `window` holds its partial sums [T, E], without gaps between rows, as the kernel before
// has left them. sum = ((p0 + p1) + p2) + ..., float32; then the residual takes it, rounded once to
// its dtype, and out = RmsNorm(residual). The same bits on all ranks.
//
// With `rows` (int32 [R]): out[r] is the norm of residual[rows[r]] and the sum of that row;
// residual stays. Otherwise out, residual: [T, E]. weight float32 [E].
//
// A kernel waits for its peers, which must launch theirs: see PeerWindows::Abort.
absl::Status SumAddRmsNorm(const PeerWindows& peers, int window, ResidualUse use,
                           const MatrixView& residual, const int32_t* rows, const float* weight,
                           float eps, const MatrixView& out, const CudaContext& context);

}  // namespace lockstep
