#include "model/cuda_rank_sums.h"

#include "model/cuda_sum.h"

namespace lockstep {

absl::StatusOr<CudaRankSums> CudaRankSums::Create(const CudaRankSumsOptions& options,
                                                  const CudaRankContext& rank,
                                                  CudaObservation& observation) {
  CudaRankSums sums;
  sums.options_ = options;
  sums.nccl_ = rank.nccl;
  sums.peers_ = rank.peers;
  sums.observation_ = &observation;
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
  if (InPeerMemory(num_tokens)) {
    LOCKSTEP_RETURN_IF_ERROR(SumInPeerMemory(num_tokens, sum, rows, norm, out, context));
    return ShowNorm(num_tokens, sum, out);
  }
  const MatrixView residual = Residual(num_tokens);
  const MatrixView partial = Partial(num_tokens, sum);
  const float eps = options_.norm_eps;
  if (nccl_ != nullptr) {
    LOCKSTEP_RETURN_IF_ERROR(nccl_->AllReduceSum(partial.data, partial.rows * partial.cols,
                                                 partial.dtype, context.stream));
  }
  LOCKSTEP_RETURN_IF_ERROR(ShowSum(sum, partial));
  LOCKSTEP_RETURN_IF_ERROR(sum == 0 ? RmsNorm(residual, norm, eps, out, context)
                           : rows == nullptr
                               ? AddRmsNorm(residual, partial, norm, eps, out, context)
                               : AddRmsNormRows(residual, partial, rows, norm, eps, out, context));
  return ShowNorm(num_tokens, sum, out);
}

// The kernel does not leave the sum behind. For who looks it makes it once more beforehand, in
// place of a residual stream and with a norm for nobody: the windows hold the parts until the sum
// after the next.
absl::Status CudaRankSums::SumInPeerMemory(int64_t num_tokens, int64_t sum, const int32_t* rows,
                                           const float* norm, const MatrixView& out,
                                           const CudaContext& context) const {
  const int window = WindowOfSum(sum, options_.num_layers);
  const MatrixView residual = Residual(num_tokens);
  const float eps = options_.norm_eps;
  if (sum == 0) {
    LOCKSTEP_RETURN_IF_ERROR(SumAddRmsNorm(*peers_, window, ResidualUse::kReplace, residual, rows,
                                           norm, eps, out, context));
    return ShowSum(sum, residual);
  }
  if (observation_->active()) {
    const MatrixView delta = View(delta_, num_tokens);
    LOCKSTEP_RETURN_IF_ERROR(SumAddRmsNorm(*peers_, window, ResidualUse::kReplace, delta, nullptr,
                                           norm, eps, View(normed_, num_tokens), context));
    LOCKSTEP_RETURN_IF_ERROR(ShowSum(sum, delta));
  }
  return SumAddRmsNorm(*peers_, window, ResidualUse::kAdd, residual, rows, norm, eps, out, context);
}

absl::Status CudaRankSums::ShowSum(int64_t sum, const MatrixView& m) const {
  if (sum == 0) return observation_->Show(kNoLayer, TensorKind::kEmbedding, m);
  const bool of_o = sum % 2 == 1;
  return observation_->Show((sum - 1) / 2, of_o ? TensorKind::kOProj : TensorKind::kDownProj, m);
}

// And the residual stream, where a sum has been added to it.
absl::Status CudaRankSums::ShowNorm(int64_t num_tokens, int64_t sum, const MatrixView& out) const {
  if (sum == 2 * options_.num_layers) {
    return observation_->Show(kNoLayer, TensorKind::kFinalNorm, out);
  }
  const int64_t layer = sum / 2;  // that the norm belongs to
  const bool of_o = sum % 2 == 1;
  if (sum > 0) {
    LOCKSTEP_RETURN_IF_ERROR(observation_->Show(
        of_o ? layer : layer - 1, of_o ? TensorKind::kAttentionResidual : TensorKind::kMlpResidual,
        Residual(num_tokens)));
  }
  return observation_->Show(layer, of_o ? TensorKind::kPostAttentionNorm : TensorKind::kInputNorm,
                            out);
}

}  // namespace lockstep
