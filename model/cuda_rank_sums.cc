#include "model/cuda_rank_sums.h"

#include <algorithm>

#include "model/row_slices.h"
#include "runtime/core/log.h"

namespace lockstep {

namespace {

void LogPaths(const CudaRankSumsOptions& options, const CudaRankContext& rank,
              const SumPaths* paths) {
  const std::string nccl = "NCCL " + NcclCommunicator::Version();
  if (paths == nullptr) {
    LogInfo(
        absl::StrFormat("sums over ranks: %s, because the kernels over the GPUs' own memory "
                        "do not take rows of %d %s",
                        nccl, options.hidden_size, std::string(Name(options.dtype))));
    return;
  }
  LogInfo(absl::StrFormat(
      "sums over ranks: one-shot up to %d KiB, two-shot up to %.1f MiB, %s beyond (a token is %.1f "
      "KiB; %d windows of %.1f MiB on each GPU)",
      paths->one_shot_bytes >> 10, static_cast<double>(paths->two_shot_bytes) / 1048576.0, nccl,
      static_cast<double>(options.hidden_size * SizeOf(options.dtype)) / 1024.0,
      PeerWindows::kNumWindows, static_cast<double>(rank.peers->window_bytes()) / 1048576.0));
}

}  // namespace

absl::StatusOr<CudaRankSums> CudaRankSums::Create(const CudaRankSumsOptions& options,
                                                  const CudaRankContext& rank,
                                                  CudaObservation& observation) {
  CudaRankSums sums;
  sums.options_ = options;
  sums.nccl_ = rank.nccl;
  sums.observation_ = &observation;
  if (rank.peers != nullptr) {
    if (SumAddRmsNormSupports(options.hidden_size, options.dtype)) {
      sums.peers_ = rank.peers;
      sums.paths_ = ChooseSumPaths(rank.peers->addresses().size, rank.peers->window_bytes());
    }
    LogPaths(options, rank, sums.peers_ != nullptr ? &sums.paths_ : nullptr);
  }
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

// By what all ranks know alike: none disagrees.
SumPath CudaRankSums::Path(int64_t num_tokens) const {
  if (peers_ == nullptr) return SumPath::kNccl;
  return paths_.Of(num_tokens * options_.hidden_size * SizeOf(options_.dtype));
}

MatrixView CudaRankSums::Partial(int64_t num_tokens, int64_t sum) const {
  MatrixView partial = View(sum == 0 ? residual_ : delta_, num_tokens);
  if (Path(num_tokens) != SumPath::kNccl) {
    partial.data = peers_->window(WindowOfSum(sum, options_.num_layers));
  }
  return partial;
}

// Two-shot, in the place of the parts.
MatrixView CudaRankSums::Normed(int64_t num_tokens, int64_t sum) const {
  LOCKSTEP_CHECK(sum < 2 * options_.num_layers);
  return Path(num_tokens) == SumPath::kTwoShot ? Partial(num_tokens, sum)
                                               : View(normed_, num_tokens);
}

MatrixView CudaRankSums::LastNormed(int64_t num_tokens, int64_t num_rows) const {
  MatrixView last = View(last_, num_rows);
  if (Path(num_tokens) == SumPath::kTwoShot) last.data = peers_->window(kWindowOfWantedRows);
  return last;
}

absl::Status CudaRankSums::SumAndNorm(int64_t num_tokens, int64_t sum, const float* norm,
                                      const CudaContext& context) const {
  return Sum(num_tokens, sum, nullptr, norm, Normed(num_tokens, sum), context);
}

absl::Status CudaRankSums::SumRowsAndNorm(int64_t num_tokens, int64_t sum, Range rows,
                                          const float* norm, int max_blocks,
                                          const CudaContext& context) const {
  LOCKSTEP_CHECK(sum > 0 && !observation_->active());
  const MatrixView residual = Residual(num_tokens), normed = Normed(num_tokens, sum);
  if (Path(num_tokens) != SumPath::kNccl) {
    const PeerSum peer_sum = {.path = Path(num_tokens),
                              .window = WindowOfSum(sum, options_.num_layers),
                              .rows = rows,
                              .use = ResidualUse::kAdd,
                              .max_blocks = std::min(max_blocks, kMaxPeerBlocks)};
    return SumAddRmsNorm(*peers_, peer_sum, residual, norm, options_.norm_eps, normed, context);
  }
  const MatrixView partial = RowsOf(Partial(num_tokens, sum), rows);
  if (nccl_ != nullptr) {
    LOCKSTEP_RETURN_IF_ERROR(nccl_->AllReduceSum(partial.data, partial.rows * partial.cols,
                                                 partial.dtype, context.stream));
  }
  return AddRmsNorm(RowsOf(residual, rows), partial, norm, options_.norm_eps, RowsOf(normed, rows),
                    context);
}

absl::Status CudaRankSums::LastSumAndNorm(int64_t num_tokens, const int32_t* rows, int64_t num_rows,
                                          const float* norm, const CudaContext& context) const {
  return Sum(num_tokens, 2 * options_.num_layers, rows, norm, LastNormed(num_tokens, num_rows),
             context);
}

absl::Status CudaRankSums::Sum(int64_t num_tokens, int64_t sum, const int32_t* rows,
                               const float* norm, const MatrixView& out,
                               const CudaContext& context) const {
  if (Path(num_tokens) != SumPath::kNccl) {
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

absl::Status CudaRankSums::SumInPeerMemory(int64_t num_tokens, int64_t sum, const int32_t* rows,
                                           const float* norm, const MatrixView& out,
                                           const CudaContext& context) const {
  if (observation_->active()) {
    LOCKSTEP_RETURN_IF_ERROR(SumForObserver(num_tokens, sum, norm, context));
  }
  const PeerSum peer_sum = {.path = Path(num_tokens),
                            .window = WindowOfSum(sum, options_.num_layers),
                            .rows = {0, num_tokens},
                            .use = sum == 0 ? ResidualUse::kReplace : ResidualUse::kAdd,
                            .wanted = rows};
  return SumAddRmsNorm(*peers_, peer_sum, Residual(num_tokens), norm, options_.norm_eps, out,
                       context);
}

// The kernel does not leave the sum behind, nor, two-shot, a whole residual stream. For who looks
// they are made beforehand, one-shot, which leaves the parts as they are, with a norm for nobody.
// That goes into another window: at this place of a step those are of no use.
absl::Status CudaRankSums::SumForObserver(int64_t num_tokens, int64_t sum, const float* norm,
                                          const CudaContext& context) const {
  PeerSum peer_sum = {.window = WindowOfSum(sum, options_.num_layers),
                      .rows = {0, num_tokens},
                      .use = ResidualUse::kReplace};
  MatrixView unused = View(normed_, num_tokens);
  unused.data = peers_->window((peer_sum.window + 2) % PeerWindows::kNumWindows);
  const MatrixView delta = View(delta_, num_tokens);
  LOCKSTEP_RETURN_IF_ERROR(
      SumAddRmsNorm(*peers_, peer_sum, delta, norm, options_.norm_eps, unused, context));
  LOCKSTEP_RETURN_IF_ERROR(ShowSum(sum, delta));
  if (Path(num_tokens) != SumPath::kTwoShot) return absl::OkStatus();
  if (sum > 0) peer_sum.use = ResidualUse::kAdd;
  return SumAddRmsNorm(*peers_, peer_sum, WholeResidual(num_tokens), norm, options_.norm_eps,
                       unused, context);
}

// Of an observed step. Where each rank keeps its own rows, it is in the place of norms, which are
// in the windows then.
MatrixView CudaRankSums::WholeResidual(int64_t num_tokens) const {
  return Path(num_tokens) == SumPath::kTwoShot ? View(normed_, num_tokens) : Residual(num_tokens);
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
        WholeResidual(num_tokens)));
  }
  return observation_->Show(layer, of_o ? TensorKind::kPostAttentionNorm : TensorKind::kInputNorm,
                            out);
}

}  // namespace lockstep
