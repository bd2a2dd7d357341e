// One layer's attention on this rank: geometry and backend, no weights.
#pragma once

#include <cstdint>
#include <span>
#include <utility>

#include "attention/attention_backend.h"
#include "model/model_config.h"
#include "parallel/partition.h"

namespace lockstep {

class AttentionLayer {
 public:
  // The backend must outlive the layer.
  AttentionLayer(AttentionGeometry geometry, const AttentionBackend& backend)
      : geometry_(std::move(geometry)), backend_(&backend) {}

  const AttentionGeometry& geometry() const { return geometry_; }

  // qkv float32 [T, (Hq_local + 2 * Hkv_local) * D] is [q, k, v] with q and k already rotated.
  // Writes k and v to the new tokens' slots, then attends: out float32 [T, Hq_local * D].
  void Forward(const MatrixView& qkv, std::span<const int64_t> slots,
               const AttentionMetadata& metadata, const KvCacheView& cache,
               const MatrixView& out) const;

 private:
  AttentionGeometry geometry_;
  const AttentionBackend* backend_;
};

// Rows of a projection, or columns of its result, that belong to a range of heads.
Range HeadRows(Range heads, int64_t head_dim);
// A layer's geometry on the rank that holds `partition`.
AttentionGeometry LocalGeometry(const ModelConfig& config, const RankPartition& partition,
                                int64_t layer);

// Columns [begin, begin + cols) of a float32 matrix.
MatrixView Columns(const MatrixView& m, int64_t begin, int64_t cols);

}  // namespace lockstep
