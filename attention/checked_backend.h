// Runs a backend and the "reference" backend on every batch and compares them: the run-time check
// of a fast backend on the data of a real run.
//
// What is compared, for each Forward: every element of every row that belongs to a request, and
// that padding rows are zero. Both outputs are NaN beforehand, so a row that is left out shows. A
// NaN on one side alone is an infinite difference; on both sides it is what the formula gives (the
// model computed it before attention), and is counted. For each WriteKv: the slots read back must
// hold the rows, converted to the cache's dtype, exactly; whether it wrote elsewhere too is not
// looked at, but shows when what lay there is read.
//
// Cost: the reference gathers each request's whole history in double, single-threaded, for each
// layer; a step is tens to hundreds of times slower. Results are the chosen backend's, unchanged.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "attention/attention_backend.h"

namespace lockstep {

// Where the backend and the reference are apart. Heads are local to the rank, `request` is the
// index in the step's batch.
struct AttentionDifference {
  enum class Where { kOutput, kWrittenKeys, kWrittenValues };

  Where where = Where::kOutput;
  // |value - expected| / largest magnitude of the reference's row (all its heads); infinite where
  // one of them is no number. Of a write: of the row of the head.
  double relative = 0;
  int64_t step = 0;       // calls of BuildMetadata, from 1
  int64_t layer = 0;      // calls of Forward since then, from 0
  int64_t request = -1;   // -1: a padding row, or a write of rows that are not the batch's
  int64_t row = 0;        // of the step's batch
  int64_t position = -1;  // in its sequence; -1 like `request`
  int64_t slot = -1;      // of a write
  int64_t head = 0;       // query head; KV head of a write
  int64_t element = 0;    // within the head
  float value = 0;        // the backend's
  float expected = 0;     // the reference's
};

// Largest relative difference that rounding explains, by what the cache holds:
// - float32: 2^-12. Sums and exponentials in float32 (unit roundoff u = 2^-24): a logit of size L
//   is off by a few L * u, which its weight inherits as a relative error, and averaging many values
//   leaves a row some ten times smaller than they are; 2^12 * u leaves room for L = 100 and both.
// - bfloat16: 2^-6, float16: 2^-9. The keys and values are the same for both sides, but a backend
//   may round queries and softmax weights to the cache's dtype for its products (u = 2^-8 and
//   2^-11), and is given four of those. A backend that computes in float32 stays far below.
double AttentionTolerance(DType kv_dtype);

class CheckedBackend : public AttentionBackend {
 public:
  // InvalidArgument when `backend` is the reference itself: nothing would be compared.
  static absl::StatusOr<std::unique_ptr<CheckedBackend>> Create(
      std::unique_ptr<AttentionBackend> backend);

  std::string name() const override;  // "cpu, checked"
  // The backend's, but for graphs: comparing happens on the host.
  const AttentionCapabilities& capabilities() const override { return capabilities_; }
  absl::StatusOr<std::unique_ptr<AttentionMetadata>> BuildMetadata(
      const AttentionBatch& batch, int64_t block_size) const override;
  // From one thread at a time, all of them: they keep what was found. To be told by its layer and
  // request, a layer's WriteKv comes after BuildMetadata and before the layer's Forward.
  void WriteKv(const MatrixView& keys, const MatrixView& values, std::span<const int64_t> slots,
               const KvCacheView& cache) const override;
  void Forward(const AttentionGeometry& geometry, const AttentionMetadata& metadata,
               const MatrixView& query, const KvCacheView& cache,
               const MatrixView& out) const override;

  // OK while every difference was within AttentionTolerance; else Internal with the first that was
  // not: step, layer, request, position, head and both values. Cheap: made to be asked each step.
  absl::Status status() const;
  // One line for the log: how much was compared, and the largest difference and its place.
  std::string Summary() const;
  // The largest so far; relative 0 when none.
  const AttentionDifference& largest() const { return found_.largest; }

 private:
  struct Findings {
    AttentionDifference largest;
    AttentionDifference first;  // beyond the tolerance; valid when `failed`
    bool failed = false;
    DType kv_dtype = DType::kF32;
    int64_t steps = 0;
    int64_t layers = 0;           // Forward calls, all steps
    int64_t rows = 0;             // all layers
    int64_t rows_not_finite = 0;  // NaN on both sides
  };

  explicit CheckedBackend(std::unique_ptr<AttentionBackend> backend);
  void Locate(int64_t row, AttentionDifference& place) const;
  void CompareRow(const AttentionGeometry& geometry, AttentionDifference place, const float* value,
                  const float* expected) const;
  void CompareWritten(AttentionDifference place, const float* wanted,
                      const KvCacheView& cache) const;
  void Keep(const AttentionDifference& difference, double tolerance) const;
  std::string Describe(const AttentionDifference& difference) const;

  const std::unique_ptr<AttentionBackend> backend_;
  const std::unique_ptr<AttentionBackend> reference_;
  AttentionCapabilities capabilities_;
  mutable Findings found_;
  mutable int64_t layer_ = 0;  // Forward calls since BuildMetadata
  // Of the last BuildMetadata's batch.
  mutable std::vector<int32_t> query_start_loc_;
  mutable std::vector<int32_t> seq_lens_;
  mutable std::vector<int64_t> slot_mapping_;
  mutable std::vector<float> expected_;  // [T, Hq_local * D], only grows
  mutable std::vector<char> converted_;  // [D] of the cache's dtype
};

}  // namespace lockstep
