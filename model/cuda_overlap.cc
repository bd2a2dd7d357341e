#include "model/cuda_overlap.h"

namespace lockstep {

absl::StatusOr<CudaOverlap> CudaOverlap::Create(const ModelConfig& config, int64_t min_tokens,
                                                int spare_multiprocessors,
                                                const CudaRankSums& sums) {
  CudaOverlap overlap;
  overlap.sums_ = &sums;
  overlap.num_layers_ = config.num_layers;
  overlap.min_tokens_ = min_tokens;
  overlap.spare_multiprocessors_ = spare_multiprocessors;
  const int64_t heads = config.num_query_heads + 2 * config.num_kv_heads;
  overlap.qkv_work_ = heads * config.head_dim;
  overlap.o_work_ = config.num_query_heads * config.head_dim;
  overlap.gate_up_work_ = 2 * config.intermediate_size;
  overlap.down_work_ = config.intermediate_size;
  if (min_tokens == 0) return overlap;
  LOCKSTEP_CHECK(min_tokens >= 2 && spare_multiprocessors > 0);
  LOCKSTEP_ASSIGN_OR_RETURN(overlap.stream_, OwnedCudaStream::CreateUrgent());
  LOCKSTEP_ASSIGN_OR_RETURN(overlap.multiplied_, OwnedCudaEvent::Create());
  for (OwnedCudaEvent& summed : overlap.summed_) {
    LOCKSTEP_ASSIGN_OR_RETURN(summed, OwnedCudaEvent::Create());
  }
  return overlap;
}

RowSlices CudaOverlap::SlicesOf(int64_t sum, int64_t num_tokens, bool overlaps) const {
  if (!overlaps || sum == 0 || sum == 2 * num_layers_) return {{0, num_tokens}};
  return sum % 2 == 1 ? CutRows(num_tokens, o_work_, gate_up_work_)
                      : CutRows(num_tokens, down_work_, qkv_work_);
}

CudaContext CudaOverlap::ForProduct(const CudaContext& context, bool cut, bool beside_sum) const {
  CudaContext result = context;
  if (beside_sum) result.spare_multiprocessors = spare_multiprocessors_;
  // What comes before it in its stream may be the wait for another stream.
  if (cut) result.programmatic_launch = false;
  return result;
}

absl::Status CudaOverlap::ProductAndSum(const MatrixView& x, const DeviceMatrix& weight,
                                        const DeviceMatrix& bias, int64_t sum,
                                        const DeviceMatrix& norm, bool overlaps,
                                        const CudaContext& context) {
  const MatrixView partial = sums_->Partial(x.rows, sum);
  const RowSlices slices = SlicesOf(sum, x.rows, overlaps);
  if (slices.size() == 1) {
    LOCKSTEP_RETURN_IF_ERROR(Linear(x, weight.view, bias.view.data, partial, context));
    return sums_->SumAndNorm(x.rows, sum, norm.values(), context);
  }
  CudaContext beside = context;
  beside.stream = stream_.get();
  // What comes before a sum in its stream is the wait for another stream, not a kernel that it
  // might overtake the end of.
  beside.programmatic_launch = false;
  for (size_t i = 0; i < slices.size(); ++i) {
    const Range rows = slices[i];
    LOCKSTEP_RETURN_IF_ERROR(Linear(RowsOf(x, rows), weight.view, bias.view.data,
                                    RowsOf(partial, rows), ForProduct(context, true, i > 0)));
    LOCKSTEP_RETURN_IF_ERROR(multiplied_.Record(context.stream));
    LOCKSTEP_RETURN_IF_ERROR(multiplied_.HoldBack(beside.stream));
    LOCKSTEP_RETURN_IF_ERROR(
        sums_->SumRowsAndNorm(x.rows, sum, rows, norm.values(), spare_multiprocessors_, beside));
    LOCKSTEP_RETURN_IF_ERROR(summed_[i].Record(beside.stream));
  }
  return absl::OkStatus();
}

absl::Status CudaOverlap::ProductOfNorm(int64_t sum, const DeviceMatrix& weight,
                                        const DeviceMatrix& bias, const MatrixView& y,
                                        bool overlaps, const CudaContext& context) {
  const MatrixView x = sums_->Normed(y.rows, sum);
  const RowSlices slices = SlicesOf(sum, y.rows, overlaps);
  for (size_t i = 0; i < slices.size(); ++i) {
    if (slices.size() > 1) LOCKSTEP_RETURN_IF_ERROR(summed_[i].HoldBack(context.stream));
    LOCKSTEP_RETURN_IF_ERROR(Linear(RowsOf(x, slices[i]), weight.view, bias.view.data,
                                    RowsOf(y, slices[i]),
                                    ForProduct(context, slices.size() > 1, i + 1 < slices.size())));
  }
  return absl::OkStatus();
}

absl::Status CudaOverlap::WaitIdle() {
  return stream_.get() == nullptr ? absl::OkStatus() : Synchronize(stream_.get());
}

}  // namespace lockstep
