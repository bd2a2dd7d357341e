#include "model/tensor_observer.h"

#include <utility>

#include "runtime/core/status.h"

namespace lockstep {
namespace {

// Ranges side by side in the local tensor, each somewhere in the whole one.
class Runs {
 public:
  Runs& Add(Range full, int64_t full_offset) {
    runs_.push_back({local_, full_offset + full.begin, full.size()});
    local_ += full.size();
    return *this;
  }
  std::vector<ColumnRun> Take() { return std::move(runs_); }

 private:
  std::vector<ColumnRun> runs_;
  int64_t local_ = 0;
};

Range Times(Range heads, int64_t head_dim) {
  return {heads.begin * head_dim, heads.end * head_dim};
}

std::string DescribeHead(const char* what, int64_t column, int64_t head_dim) {
  return absl::StrFormat("%s head %d, element %d", what, column / head_dim, column % head_dim);
}

}  // namespace

std::string_view Name(TensorKind kind) {
  switch (kind) {
    case TensorKind::kEmbedding:
      return "embed_tokens";
    case TensorKind::kInputNorm:
      return "input_layernorm";
    case TensorKind::kQkv:
      return "qkv";
    case TensorKind::kAttention:
      return "attention";
    case TensorKind::kOProj:
      return "o_proj";
    case TensorKind::kAttentionResidual:
      return "residual after attention";
    case TensorKind::kPostAttentionNorm:
      return "post_attention_layernorm";
    case TensorKind::kGateUp:
      return "gate_up";
    case TensorKind::kActivated:
      return "activated";
    case TensorKind::kDownProj:
      return "down_proj";
    case TensorKind::kMlpResidual:
      return "residual after mlp";
    case TensorKind::kFinalNorm:
      return "norm";
    case TensorKind::kLogits:
      return "logits";
  }
  LOCKSTEP_CHECK(false);
}

std::vector<ColumnRun> LocalColumns(TensorKind kind, const ModelConfig& config,
                                    const RankPartition& partition) {
  const Range q = Times(partition.query_heads, config.head_dim);
  const Range kv = Times(partition.kv_heads, config.head_dim);
  const int64_t q_cols = config.num_query_heads * config.head_dim;
  const int64_t kv_cols = config.num_kv_heads * config.head_dim;
  switch (kind) {
    case TensorKind::kQkv:
      return Runs().Add(q, 0).Add(kv, q_cols).Add(kv, q_cols + kv_cols).Take();
    case TensorKind::kAttention:
      return Runs().Add(q, 0).Take();
    case TensorKind::kGateUp:
      return Runs()
          .Add(partition.intermediate, 0)
          .Add(partition.intermediate, config.intermediate_size)
          .Take();
    case TensorKind::kActivated:
      return Runs().Add(partition.intermediate, 0).Take();
    case TensorKind::kLogits:
      return Runs().Add(partition.vocab, 0).Take();
    default:
      return Runs().Add({0, config.hidden_size}, 0).Take();
  }
}

std::string DescribeColumn(TensorKind kind, const ModelConfig& config, int64_t column) {
  const int64_t dim = config.head_dim;
  const int64_t q_cols = config.num_query_heads * dim;
  const int64_t kv_cols = config.num_kv_heads * dim;
  const bool is_qkv = kind == TensorKind::kQkv;
  if (is_qkv && column >= q_cols + kv_cols) {
    return DescribeHead("value", column - q_cols - kv_cols, dim);
  }
  if (is_qkv && column >= q_cols) return DescribeHead("key", column - q_cols, dim);
  if (is_qkv || kind == TensorKind::kAttention) return DescribeHead("query", column, dim);
  if (kind == TensorKind::kGateUp) {
    const bool up = column >= config.intermediate_size;
    return absl::StrFormat("%s row %d", up ? "up" : "gate",
                           up ? column - config.intermediate_size : column);
  }
  if (kind == TensorKind::kActivated) return absl::StrFormat("row %d of gate and up", column);
  if (kind == TensorKind::kLogits) return absl::StrFormat("token id %d", column);
  return absl::StrFormat("column %d", column);
}

}  // namespace lockstep
