#include "model/layers.h"

#include <utility>

namespace lockstep {

namespace {

// One rectangle of the tensor, packed.
absl::StatusOr<Weight> LoadPacked(const Checkpoint& checkpoint, const std::string& name, Range rows,
                                  Range cols, DType dtype) {
  LOCKSTEP_ASSIGN_OR_RETURN(Weight weight,
                            Weight::CreatePackable(rows.size(), cols.size(), dtype, name));
  LOCKSTEP_RETURN_IF_ERROR(checkpoint.Read(name, rows, cols, weight.view()));
  weight.Pack();
  return weight;
}

absl::StatusOr<Weight> LoadVector(const Checkpoint& checkpoint, const std::string& name,
                                  int64_t size) {
  LOCKSTEP_ASSIGN_OR_RETURN(Weight weight, Weight::Create(1, size, DType::kF32, name));
  LOCKSTEP_RETURN_IF_ERROR(checkpoint.Read(name, {0, 1}, {0, size}, weight.view()));
  return weight;
}

absl::Status SumOverRanks(const MatrixView& y, Communicator& communicator) {
  LOCKSTEP_CHECK(y.stride == y.cols);
  if (y.rows == 0) return absl::OkStatus();  // on all ranks alike
  return communicator.AllReduceSum(static_cast<float*>(y.data), y.rows * y.cols);
}

}  // namespace

absl::StatusOr<Weight> Weight::WithBytes(int64_t bytes, int64_t rows, int64_t cols, DType dtype,
                                         const std::string& what) {
  Weight weight;
  LOCKSTEP_ASSIGN_OR_RETURN(weight.storage_, Buffer::Create(bytes, what));
  weight.view_ = {weight.storage_.data(), dtype, rows, cols, cols};
  return weight;
}

absl::StatusOr<Weight> Weight::Create(int64_t rows, int64_t cols, DType dtype,
                                      const std::string& what) {
  return WithBytes(rows * cols * SizeOf(dtype), rows, cols, dtype, what);
}

absl::StatusOr<Weight> Weight::CreatePackable(int64_t rows, int64_t cols, DType dtype,
                                              const std::string& what) {
  return WithBytes(PackedBytes(rows, cols, dtype), rows, cols, dtype, what);
}

void Weight::Pack() {
  packed_ = PackInPlace(storage_, view_.dtype, view_.rows, view_.cols);
  view_.data = nullptr;
}

MatrixView Weight::Rows(Range rows) const {
  MatrixView part = view_;
  part.data = storage_.as<char>() + rows.begin * view_.stride * SizeOf(view_.dtype);
  part.rows = rows.size();
  return part;
}

absl::StatusOr<ColumnParallelLinear> ColumnParallelLinear::Load(const Checkpoint& checkpoint,
                                                                const std::vector<RowSlice>& slices,
                                                                int64_t input_size, DType dtype) {
  LOCKSTEP_CHECK(!slices.empty());
  int64_t rows = 0;
  for (const RowSlice& slice : slices) {
    LOCKSTEP_CHECK(slice.bias.empty() == slices[0].bias.empty());
    rows += slice.rows.size();
  }
  ColumnParallelLinear layer;
  LOCKSTEP_ASSIGN_OR_RETURN(layer.weight_,
                            Weight::CreatePackable(rows, input_size, dtype, slices[0].weight));
  const bool has_bias = !slices[0].bias.empty();
  if (has_bias) {
    LOCKSTEP_ASSIGN_OR_RETURN(layer.bias_, Weight::Create(1, rows, DType::kF32, slices[0].bias));
  }
  int64_t row = 0;
  for (const RowSlice& slice : slices) {
    const int64_t end = row + slice.rows.size();
    LOCKSTEP_RETURN_IF_ERROR(
        checkpoint.Read(slice.weight, slice.rows, {0, input_size}, layer.weight_.Rows({row, end})));
    if (has_bias) {
      MatrixView part = layer.bias_.view();
      part.data = part.row<float>(0) + row;
      part.cols = slice.rows.size();
      LOCKSTEP_RETURN_IF_ERROR(checkpoint.Read(slice.bias, {0, 1}, slice.rows, part));
    }
    row = end;
  }
  layer.weight_.Pack();
  return layer;
}

void ColumnParallelLinear::Forward(const MatrixView& x, const MatrixView& y,
                                   const OpContext& context) const {
  Linear(x, weight_.packed(), bias_.values(), y, context);
}

absl::StatusOr<RowParallelLinear> RowParallelLinear::Load(const Checkpoint& checkpoint,
                                                          const std::string& weight,
                                                          const std::string& bias,
                                                          int64_t output_size, Range columns,
                                                          DType dtype, int rank) {
  RowParallelLinear layer;
  LOCKSTEP_ASSIGN_OR_RETURN(layer.weight_,
                            LoadPacked(checkpoint, weight, {0, output_size}, columns, dtype));
  if (!bias.empty() && rank == 0) {
    LOCKSTEP_ASSIGN_OR_RETURN(layer.bias_, LoadVector(checkpoint, bias, output_size));
  }
  return layer;
}

absl::Status RowParallelLinear::Forward(const MatrixView& x, const MatrixView& y,
                                        const OpContext& context,
                                        Communicator& communicator) const {
  Linear(x, weight_.packed(), bias_.values(), y, context);
  return SumOverRanks(y, communicator);
}

absl::StatusOr<VocabParallelEmbedding> VocabParallelEmbedding::Load(const Checkpoint& checkpoint,
                                                                    const std::string& weight,
                                                                    Range vocab,
                                                                    int64_t hidden_size,
                                                                    DType dtype) {
  VocabParallelEmbedding layer;
  layer.vocab_ = vocab;
  LOCKSTEP_ASSIGN_OR_RETURN(layer.weight_,
                            LoadPacked(checkpoint, weight, vocab, {0, hidden_size}, dtype));
  return layer;
}

absl::Status VocabParallelEmbedding::Forward(std::span<const int32_t> ids, const MatrixView& out,
                                             const OpContext& context,
                                             Communicator& communicator) const {
  GatherRows(ids, vocab_, weight_.packed(), out, context);
  return SumOverRanks(out, communicator);
}

absl::StatusOr<ParallelHead> ParallelHead::Load(const Checkpoint& checkpoint,
                                                const std::string& weight, Range vocab,
                                                int64_t hidden_size, DType dtype) {
  ParallelHead head;
  LOCKSTEP_ASSIGN_OR_RETURN(head.own_,
                            LoadPacked(checkpoint, weight, vocab, {0, hidden_size}, dtype));
  head.weight_ = head.own_.packed();
  return head;
}

ParallelHead ParallelHead::TiedTo(const VocabParallelEmbedding& embedding) {
  ParallelHead head;
  head.weight_ = embedding.weight();
  return head;
}

void ParallelHead::Forward(const MatrixView& x, const MatrixView& logits,
                           const OpContext& context) const {
  Linear(x, weight_, nullptr, logits, context);
}

absl::StatusOr<RmsNormLayer> RmsNormLayer::Load(const Checkpoint& checkpoint,
                                                const std::string& weight, int64_t size,
                                                double eps) {
  RmsNormLayer layer;
  layer.eps_ = static_cast<float>(eps);
  LOCKSTEP_ASSIGN_OR_RETURN(layer.weight_, LoadVector(checkpoint, weight, size));
  return layer;
}

}  // namespace lockstep
