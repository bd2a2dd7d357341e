#include "model/cuda_attention_check.h"

#include <algorithm>

#include "attention/checked_backend.h"

namespace lockstep {

absl::StatusOr<std::unique_ptr<CudaAttentionCheck>> CudaAttentionCheck::Create(DType dtype,
                                                                               int64_t max_tokens,
                                                                               int64_t width) {
  std::unique_ptr<CudaAttentionCheck> check(new CudaAttentionCheck());
  check->dtype_ = dtype;
  LOCKSTEP_ASSIGN_OR_RETURN(
      check->expected_,
      DeviceBuffer::Create(max_tokens * width * SizeOf(dtype), "--check-attention"));
  LOCKSTEP_ASSIGN_OR_RETURN(
      check->differences_,
      DeviceBuffer::Create(max_tokens * static_cast<int64_t>(sizeof(CudaRowDifference)),
                           "--check-attention"));
  return check;
}

void CudaAttentionCheck::BeginStep(const AttentionBatch& batch) {
  ++steps_;
  query_start_loc_.assign(batch.query_start_loc.begin(), batch.query_start_loc.end());
  seq_lens_.assign(batch.seq_lens.begin(), batch.seq_lens.end());
}

absl::Status CudaAttentionCheck::Forward(int64_t layer_index, const CudaAttentionLayer& layer,
                                         const CudaAttentionBatch& batch,
                                         CudaAttentionWorkspace& workspace, const CudaRows& query,
                                         const KvCacheView& cache, const MatrixView& out,
                                         const CudaContext& context) {
  const CudaStream stream = context.stream;
  const MatrixView expected{expected_.data(), dtype_, out.rows, out.cols, out.cols};
  for (const MatrixView& m : {out, expected}) {  // all bits set are a NaN in every format
    LOCKSTEP_RETURN_IF_ERROR(
        FillBytesAsync(m.data, 0xff, m.rows * m.stride * SizeOf(m.dtype), stream));
  }
  LOCKSTEP_RETURN_IF_ERROR(
      layer.Forward(batch, workspace, query, cache, {out.data, out.dtype, out.stride}, stream));
  LOCKSTEP_RETURN_IF_ERROR(layer.InPlainArithmetic().Forward(
      batch, workspace, query, cache, {expected.data, expected.dtype, expected.stride}, stream));
  auto* const differences = differences_.as<CudaRowDifference>();
  LOCKSTEP_RETURN_IF_ERROR(CompareRows(out, expected, differences, context));
  on_host_.resize(static_cast<size_t>(out.rows));
  LOCKSTEP_RETURN_IF_ERROR(CopyAsync(on_host_.data(), differences,
                                     out.rows * static_cast<int64_t>(sizeof(CudaRowDifference)),
                                     stream));
  LOCKSTEP_RETURN_IF_ERROR(Synchronize(stream));
  rows_ += out.rows;
  const auto worst =
      std::max_element(on_host_.begin(), on_host_.end(),
                       [](const auto& a, const auto& b) { return a.relative < b.relative; });
  if (worst == on_host_.end() || worst->relative == 0) return absl::OkStatus();
  const std::string place =
      Describe(layer_index, worst - on_host_.begin(), *worst, layer.geometry().head_dim);
  if (worst->relative > largest_) {
    largest_ = worst->relative;
    where_ = place;
  }
  const double tolerance = std::max(AttentionTolerance(out.dtype), AttentionTolerance(cache.dtype));
  if (worst->relative <= tolerance) return absl::OkStatus();
  return absl::InternalError(absl::StrFormat(
      "attention backend \"cuda\" is wrong: %s; the tolerance is %.3g", place, tolerance));
}

std::string CudaAttentionCheck::Describe(int64_t layer_index, int64_t row,
                                         const CudaRowDifference& difference,
                                         int64_t head_dim) const {
  std::string request = absl::StrFormat("row %d", row);
  for (size_t b = 0; b + 1 < query_start_loc_.size(); ++b) {
    if (row < query_start_loc_[b] || row >= query_start_loc_[b + 1]) continue;
    request = absl::StrFormat("request %d, position %d (row %d)", b,
                              seq_lens_[b] - (query_start_loc_[b + 1] - row), row);
  }
  return absl::StrFormat(
      "step %d, layer %d, %s, local query head %d, element %d: %.9g, plain arithmetic gives %.9g: "
      "%.3g of the row's largest magnitude",
      steps_, layer_index, request, difference.column / head_dim, difference.column % head_dim,
      difference.value, difference.expected, difference.relative);
}

std::string CudaAttentionCheck::Summary() const {
  return absl::StrFormat(
      "attention backend \"cuda\" against plain float32 arithmetic: %d steps, %d rows compared; %s",
      steps_, rows_, largest_ == 0 ? "no difference" : "the largest difference: " + where_);
}

}  // namespace lockstep
