#include "model/attention_layer.h"

namespace lockstep {

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
