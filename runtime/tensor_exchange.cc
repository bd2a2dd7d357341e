#include "runtime/tensor_exchange.h"

namespace lockstep {

void TensorRecorder::Observe(int64_t layer, TensorKind kind, const MatrixView& local) {
  if (!status_.ok()) return;
  status_ = CatchExhaustion("--check-tp: keeping the tensors of a step", [&] {
    if (count_ == tensors_.size()) tensors_.emplace_back();
    KeptTensor& kept = tensors_[count_];
    kept.values.clear();
    const auto keep = [&](int64_t row, int64_t first_col) {
      const float* const from = local.row<const float>(row);
      kept.values.insert(kept.values.end(), from + first_col, from + local.cols);
    };
    const int64_t rows = NumKept(local.rows);
    for (int64_t i = 0; i < rows; ++i) keep(KeptRow(i, local.rows), 0);
    if (kind == TensorKind::kQkv) {
      const int64_t first_col = local.cols - std::min(kv_cols_, local.cols);
      for (int64_t i = 0; i < local.rows - rows; ++i) keep(kFirstRowBetween + i, first_col);
    }
    kept.header = {layer, static_cast<int64_t>(kind), rows, local.cols, std::ssize(kept.values)};
    ++count_;
    return absl::OkStatus();
  });
}

const KeptTensor& TensorRecorder::Get(int64_t index) const {
  static const KeptTensor kNone;
  return index < static_cast<int64_t>(count_) ? tensors_[static_cast<size_t>(index)] : kNone;
}

void TensorRecorder::Release() {
  Clear();
  tensors_ = {};
}

absl::Status Exchange(Communicator& communicator, const KeptTensor& mine,
                      std::vector<TensorHeader>& headers, std::vector<float>& received) {
  headers.resize(static_cast<size_t>(communicator.size()));
  LOCKSTEP_RETURN_IF_ERROR(
      communicator.AllGather(&mine.header, sizeof(TensorHeader), headers.data()));
  std::vector<int64_t> bytes;
  int64_t total = 0;
  for (const TensorHeader& header : headers) {
    total += header.size;
    bytes.push_back(header.size * static_cast<int64_t>(sizeof(float)));
  }
  if (communicator.rank() == 0) received.resize(static_cast<size_t>(total));
  if (total == 0) return absl::OkStatus();  // a step without logits; on all ranks alike
  return communicator.GatherV(mine.values.data(), bytes, received.data(), 0);
}

}  // namespace lockstep
