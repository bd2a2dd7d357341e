// "reference": attention as the formula says, for tests and for checking other backends; slow, and
// chosen by name only.
//
// Keys and values of a request are gathered through its block table into dense double arrays; then,
// for a query at position i: softmax over j in [max(0, i - window + 1), i] of
// cap(scale * q . k_j) with cap(x) = c tanh(x / c), times v_j. Everything in double,
// single-threaded.
#pragma once

#include <memory>
#include <string>

#include "attention/attention_backend.h"

namespace lockstep {

class ReferenceBackend : public AttentionBackend {
 public:
  static const AttentionCapabilities& Capabilities();

  std::string name() const override { return "reference"; }
  const AttentionCapabilities& capabilities() const override { return Capabilities(); }
  absl::StatusOr<std::unique_ptr<AttentionMetadata>> BuildMetadata(
      const AttentionBatch& batch, int64_t block_size) const override;
  void WriteKv(const MatrixView& keys, const MatrixView& values, std::span<const int64_t> slots,
               const KvCacheView& cache) const override;
  void Forward(const AttentionGeometry& geometry, const AttentionMetadata& metadata,
               const MatrixView& query, const KvCacheView& cache,
               const MatrixView& out) const override;
};

}  // namespace lockstep
