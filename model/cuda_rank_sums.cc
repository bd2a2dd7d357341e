#include "model/cuda_rank_sums.h"

#include "model/cuda_sum.h"

namespace lockstep {

absl::StatusOr<CudaRankSums> CudaRankSums::Create(const CudaRankSumsOptions& options,
                                                  const CudaRankContext& rank) {
  CudaRankSums sums;
  sums.options_ = options;
  sums.nccl_ = rank.nccl;
  sums.peers_ = rank.peers;
  const int64_t bytes = options.max_tokens * options.hidden_size * SizeOf(options.dtype);
  for (DeviceBuffer* const buffer : {&sums.residual_, &sums.delta_}) {
    LOCKSTEP_ASSIGN_OR_RETURN(*buffer, DeviceBuffer::Create(bytes, "activations of a step"));
  }
  return sums;
}

// For few rows, where the ranks read each other's memory, one kernel makes the sum and the norm
// behind it.
bool CudaRankSums::InPeerMemory(int64_t num_tokens) const {
  return peers_ != nullptr && SumAddRmsNormSupports(options_.hidden_size, options_.dtype) &&
         num_tokens * options_.hidden_size * SizeOf(options_.dtype) <= peers_->window_bytes();
}

MatrixView CudaRankSums::Partial(int64_t num_tokens, int64_t sum) const {
  MatrixView partial = View(sum == 0 ? residual_ : delta_, num_tokens);
  if (InPeerMemory(num_tokens)) {
    partial.data = peers_->window(WindowOfSum(sum, options_.num_layers));
  }
  return partial;
}

absl::Status CudaRankSums::SumAndNorm(int64_t num_tokens, int64_t sum, const int32_t* rows,
                                      const float* norm, const MatrixView& out,
                                      const CudaContext& context) const {
  const MatrixView residual = Residual(num_tokens);
  const float eps = options_.norm_eps;
  if (InPeerMemory(num_tokens)) {
    return SumAddRmsNorm(*peers_, WindowOfSum(sum, options_.num_layers),
                         sum == 0 ? ResidualUse::kReplace : ResidualUse::kAdd, residual, rows, norm,
                         eps, out, context);
  }
  const MatrixView partial = Partial(num_tokens, sum);
  if (nccl_ != nullptr) {
    LOCKSTEP_RETURN_IF_ERROR(nccl_->AllReduceSum(partial.data, partial.rows * partial.cols,
                                                 partial.dtype, context.stream));
  }
  if (sum == 0) return RmsNorm(residual, norm, eps, out, context);
  if (rows == nullptr) return AddRmsNorm(residual, partial, norm, eps, out, context);
  return AddRmsNormRows(residual, partial, rows, norm, eps, out, context);
}

}  // namespace lockstep
