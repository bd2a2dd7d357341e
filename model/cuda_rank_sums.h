// The residual stream of a step on one rank, and the sums over ranks that go into it.
//
// A step of L layers has 2L + 1 sums: number 0 is of the embedding, 2l + 1 of layer l's o, 2l + 2
// of its down. Each rank's product leaves its part where Partial says; SumAndNorm adds the parts of
// all ranks to the residual stream and norms that for the next product.
#pragma once

#include <cstdint>

#include "model/cuda_decoder.h"
#include "model/cuda_observation.h"
#include "model/cuda_ops.h"
#include "model/cuda_sum.h"
#include "runtime/core/buffer.h"
#include "runtime/core/cuda_device.h"
#include "runtime/core/range.h"
#include "runtime/core/status.h"

namespace lockstep {

struct CudaRankSumsOptions {
  DType dtype = DType::kBF16;
  int64_t hidden_size = 0;  // E
  int64_t num_layers = 0;   // L
  int64_t max_tokens = 0;   // largest T
  int64_t max_rows = 0;     // largest R
  float norm_eps = 0;
};

// Thread rule: the rank's engine thread. Stream rule: the stream of the context; calls on several
// streams must be ordered (cuda_overlap.h).
class CudaRankSums {
 public:
  // Allocates; nothing is allocated later. What `rank` points to, and `observation`, must outlive
  // the object. Embedding, sums, residual stream and norms are shown to it, where somebody looks.
  // Where there is peer memory, logs which sums take which path.
  static absl::StatusOr<CudaRankSums> Create(const CudaRankSumsOptions& options,
                                             const CudaRankContext& rank,
                                             CudaObservation& observation);

  // [T, E]. The rows dealt to this rank alone where the sums of so many tokens are two-shot.
  MatrixView Residual(int64_t num_tokens) const { return View(residual_, num_tokens); }
  // Where this rank's part of a sum goes, [T, E].
  MatrixView Partial(int64_t num_tokens, int64_t sum) const;
  // Where the norm behind a sum stands until the next sum: [T, E], behind the last one [R, E].
  MatrixView Normed(int64_t num_tokens, int64_t sum) const;
  MatrixView LastNormed(int64_t num_tokens, int64_t num_rows) const;
  // COLLECTIVE. The ranks' parts become the residual stream (sum 0) or are added to it, each result
  // rounded to the dtype; Normed is then its norm. norm float32 [E]. The same bits on all ranks.
  absl::Status SumAndNorm(int64_t num_tokens, int64_t sum, const float* norm,
                          const CudaContext& context) const;
  // COLLECTIVE. The same for the rows `rows` alone, not for the first sum of a step and not where
  // somebody looks. Where the sum is a kernel of ours, of max_blocks blocks at most. Those of the
  // other rows come next; the products before and behind each need be no others than its own rows'.
  absl::Status SumRowsAndNorm(int64_t num_tokens, int64_t sum, Range rows, const float* norm,
                              int max_blocks, const CudaContext& context) const;
  // COLLECTIVE. The last sum: LastNormed is the norm of the rows `rows`, int32 [R]. The residual
  // stream is of no more use then.
  absl::Status LastSumAndNorm(int64_t num_tokens, const int32_t* rows, int64_t num_rows,
                              const float* norm, const CudaContext& context) const;

 private:
  SumPath Path(int64_t num_tokens) const;
  absl::Status Sum(int64_t num_tokens, int64_t sum, const int32_t* rows, const float* norm,
                   const MatrixView& out, const CudaContext& context) const;
  absl::Status SumInPeerMemory(int64_t num_tokens, int64_t sum, const int32_t* rows,
                               const float* norm, const MatrixView& out,
                               const CudaContext& context) const;
  absl::Status SumForObserver(int64_t num_tokens, int64_t sum, const float* norm,
                              const CudaContext& context) const;
  MatrixView WholeResidual(int64_t num_tokens) const;
  absl::Status ShowSum(int64_t sum, const MatrixView& m) const;
  absl::Status ShowNorm(int64_t num_tokens, int64_t sum, const MatrixView& out) const;
  MatrixView View(const DeviceBuffer& buffer, int64_t num_tokens) const {
    return {buffer.data(), options_.dtype, num_tokens, options_.hidden_size, options_.hidden_size};
  }

  CudaRankSumsOptions options_;
  NcclCommunicator* nccl_ = nullptr;
  const PeerWindows* peers_ = nullptr;
  CudaObservation* observation_ = nullptr;
  SumPaths paths_;
  DeviceBuffer residual_;  // [T, E]
  DeviceBuffer delta_;     // [T, E] what attention or MLP adds to it
  DeviceBuffer normed_;    // [T, E]
  DeviceBuffer last_;      // [R, E]
};

}  // namespace lockstep
