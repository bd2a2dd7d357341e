#include "model/attention_layer.h"

#include <cmath>

namespace lockstep {

Range HeadRows(Range heads, int64_t head_dim) {
  return {heads.begin * head_dim, heads.end * head_dim};
}

AttentionGeometry LocalGeometry(const ModelConfig& config, const RankPartition& partition,
                                int64_t layer) {
  AttentionGeometry geometry;
  geometry.num_query_heads = partition.query_heads.size();
  geometry.num_kv_heads = partition.kv_heads.size();
  geometry.head_dim = config.head_dim;
  geometry.kv_groups = partition.kv_groups;
  geometry.scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(config.head_dim)));
  geometry.sliding_window = config.layer_windows[layer];
  return geometry;
}

MatrixView Columns(const MatrixView& m, int64_t begin, int64_t cols) {
  LOCKSTEP_CHECK(m.dtype == DType::kF32 && begin + cols <= m.cols);
  return {static_cast<float*>(m.data) + begin, m.dtype, m.rows, cols, m.stride};
}

void AttentionLayer::Forward(const MatrixView& qkv, std::span<const int64_t> slots,
                             const AttentionMetadata& metadata, const KvCacheView& cache,
                             const MatrixView& out) const {
  const int64_t q_cols = geometry_.num_query_heads * geometry_.head_dim;
  const int64_t kv_cols = geometry_.num_kv_heads * geometry_.head_dim;
  const MatrixView query = Columns(qkv, 0, q_cols);
  const MatrixView keys = Columns(qkv, q_cols, kv_cols);
  const MatrixView values = Columns(qkv, q_cols + kv_cols, kv_cols);
  backend_->WriteKv(keys, values, slots, cache);
  backend_->Forward(geometry_, metadata, query, cache, out);
}

}  // namespace lockstep
