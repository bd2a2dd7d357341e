#include "model/cuda_rank_sums.h"

#include "model/cuda_sum.h"

namespace lockstep {

absl::StatusOr<CudaRankSums> CudaRankSums::Create(const CudaRankSumsOptions& options,
                                                  const CudaRankContext& rank) {
  CudaRankSums sums;
  sums.options_ = options;
  sums.nccl_ = rank.nccl;
  sums.peers_ = rank.peers;
  const int64_t row_bytes = options.hidden_size * SizeOf(options.dtype);
  const auto create = [&](int64_t rows) {
    return DeviceBuffer::Create(rows * row_bytes, "activations of a step");
  };
  LOCKSTEP_ASSIGN_OR_RETURN(sums.residual_, create(options.max_tokens));
  LOCKSTEP_ASSIGN_OR_RETURN(sums.delta_, create(options.max_tokens));
  LOCKSTEP_ASSIGN_OR_RETURN(sums.normed_, create(options.max_tokens));
  LOCKSTEP_ASSIGN_OR_RETURN(sums.last_, create(options.max_rows));
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

MatrixView CudaRankSums::Normed(int64_t num_tokens, int64_t sum) const {
  LOCKSTEP_CHECK(sum < 2 * options_.num_layers);
  return View(normed_, num_tokens);
}

MatrixView CudaRankSums::LastNormed(int64_t, int64_t num_rows) const {
  return View(last_, num_rows);
}

absl::Status CudaRankSums::SumAndNorm(int64_t num_tokens, int64_t sum, const float* norm,
                                      const CudaContext& context) const {
  return Sum(num_tokens, sum, nullptr, norm, Normed(num_tokens, sum), context);
}

absl::Status CudaRankSums::LastSumAndNorm(int64_t num_tokens, const int32_t* rows, int64_t num_rows,
                                          const float* norm, const CudaContext& context) const {
  return Sum(num_tokens, 2 * options_.num_layers, rows, norm, LastNormed(num_tokens, num_rows),
             context);
}

absl::Status CudaRankSums::Sum(int64_t num_tokens, int64_t sum, const int32_t* rows,
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
