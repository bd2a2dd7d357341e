// The decoder's layers that own weights. Sharding lives here: each layer reads its own rectangle of
// the checkpoint and does its own sum over the ranks, so the forward pass mentions no rank
// (Megatron-LM's column and row parallelism, arXiv:1909.08053).
//
// Load is not a collective; its errors name the tensor. Forward of a layer that says COLLECTIVE
// must be called by all ranks; the others touch this rank alone. Weights are `dtype` (float32 or
// bfloat16), activations float32, norm weights and biases float32. Immutable after Load.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "model/checkpoint/checkpoint.h"
#include "model/ops.h"
#include "parallel/communicator.h"

namespace lockstep {

// Memory of one matrix (or vector: 1 row), row-major without gaps while it is filled. What products
// read is packed then (linear_packing.h).
class Weight {
 public:
  static absl::StatusOr<Weight> Create(int64_t rows, int64_t cols, DType dtype,
                                       const std::string& what);
  // With room for Pack.
  static absl::StatusOr<Weight> CreatePackable(int64_t rows, int64_t cols, DType dtype,
                                               const std::string& what);
  Weight() = default;  // empty: no such weight

  // Before Pack.
  const MatrixView& view() const { return view_; }
  // Once, when filled, of a packable one; afterwards the matrix is packed() and view() has only its
  // shape.
  void Pack();
  const PackedMatrix& packed() const { return packed_; }
  // float32 elements, null when empty: norm weights and biases.
  const float* values() const { return storage_.as<const float>(); }
  // The part of it that holds rows [begin, end).
  MatrixView Rows(Range rows) const;
  int64_t bytes() const { return view_.rows * view_.cols * SizeOf(view_.dtype); }

 private:
  static absl::StatusOr<Weight> WithBytes(int64_t bytes, int64_t rows, int64_t cols, DType dtype,
                                          const std::string& what);

  Buffer storage_;
  MatrixView view_;
  PackedMatrix packed_;
};

// Rows of a named matrix. `bias` names the vector that goes with it, empty: none.
struct RowSlice {
  std::string weight;
  std::string bias;
  Range rows;
};

// y = x * W^T + b, where a rank holds some of W's rows: some of y's columns. Several matrices of
// the same input are stacked into one product ([q; k; v], [gate; up]).
class ColumnParallelLinear {
 public:
  static absl::StatusOr<ColumnParallelLinear> Load(const Checkpoint& checkpoint,
                                                   const std::vector<RowSlice>& slices,
                                                   int64_t input_size, DType dtype);

  int64_t local_output_size() const { return weight_.view().rows; }
  int64_t weight_bytes() const { return weight_.bytes() + bias_.bytes(); }
  // x [T, input_size] -> y [T, local_output_size].
  void Forward(const MatrixView& x, const MatrixView& y, const OpContext& context) const;

 private:
  Weight weight_;
  Weight bias_;
};

// y = x * W^T + b, where a rank holds the columns of W that meet its columns of x; the ranks'
// products are summed. The bias is in rank 0's product alone, so it counts once.
class RowParallelLinear {
 public:
  // bias: name, empty for none.
  static absl::StatusOr<RowParallelLinear> Load(const Checkpoint& checkpoint,
                                                const std::string& weight, const std::string& bias,
                                                int64_t output_size, Range columns, DType dtype,
                                                int rank);

  int64_t weight_bytes() const { return weight_.bytes() + bias_.bytes(); }
  // COLLECTIVE. x [T, columns.size()] -> y [T, output_size] without gaps between rows.
  absl::Status Forward(const MatrixView& x, const MatrixView& y, const OpContext& context,
                       Communicator& communicator) const;

 private:
  Weight weight_;
  Weight bias_;
};

// A rank holds the rows of its part of the vocabulary; the other ranks' tokens are zeros, and the
// sum fills them in.
class VocabParallelEmbedding {
 public:
  static absl::StatusOr<VocabParallelEmbedding> Load(const Checkpoint& checkpoint,
                                                     const std::string& weight, Range vocab,
                                                     int64_t hidden_size, DType dtype);

  const PackedMatrix& weight() const { return weight_.packed(); }
  int64_t weight_bytes() const { return weight_.bytes(); }
  // COLLECTIVE. out [T, E] without gaps between rows.
  absl::Status Forward(std::span<const int32_t> ids, const MatrixView& out,
                       const OpContext& context, Communicator& communicator) const;

 private:
  Range vocab_;
  Weight weight_;
};

// Logits of this rank's part of the vocabulary.
class ParallelHead {
 public:
  static absl::StatusOr<ParallelHead> Load(const Checkpoint& checkpoint, const std::string& weight,
                                           Range vocab, int64_t hidden_size, DType dtype);
  // Uses the rows of the embedding, which must outlive it: tied embeddings are stored once.
  static ParallelHead TiedTo(const VocabParallelEmbedding& embedding);

  int64_t weight_bytes() const { return own_.bytes(); }
  // x [R, E] -> logits [R, V_local].
  void Forward(const MatrixView& x, const MatrixView& logits, const OpContext& context) const;

 private:
  Weight own_;  // empty when tied
  PackedMatrix weight_;
};

// Whole on every rank.
class RmsNormLayer {
 public:
  static absl::StatusOr<RmsNormLayer> Load(const Checkpoint& checkpoint, const std::string& weight,
                                           int64_t size, double eps);

  const float* weight() const { return weight_.values(); }
  float eps() const { return eps_; }
  int64_t weight_bytes() const { return weight_.bytes(); }

 private:
  Weight weight_;
  float eps_ = 0;
};

}  // namespace lockstep
