#include "attention/reference_backend.h"

#include <algorithm>
#include <cmath>

#include "attention/batch_check.h"
#include "attention/kv_convert.h"

namespace lockstep {
namespace {

class ReferenceMetadata : public AttentionMetadata {
 public:
  AttentionBatch batch;
  int64_t block_size = 0;
  int32_t largest_block = -1;
};

double Element(DType dtype, const void* data, int64_t index) {
  switch (dtype) {
    case DType::kF32:
      return static_cast<const float*>(data)[index];
    case DType::kF16:
      return ToFloat(static_cast<const F16*>(data)[index]);
    case DType::kBF16:
      return ToFloat(static_cast<const BF16*>(data)[index]);
    case DType::kF8E4M3:
      return ToFloat(static_cast<const F8E4M3*>(data)[index]);
  }
  LOCKSTEP_CHECK(false);
}

// One request's keys or values of one head, [seq_len, D].
std::vector<double> Gather(const ReferenceMetadata& metadata, const KvCacheView& cache,
                           const void* data, double scale, int64_t request, int64_t head) {
  const AttentionBatch& batch = metadata.batch;
  std::vector<double> dense;
  dense.reserve(batch.seq_lens[request] * cache.head_dim);
  for (int64_t position = 0; position < batch.seq_lens[request]; ++position) {
    const int32_t block = batch.BlockTable(request)[position / cache.block_size];
    const int64_t offset = cache.Offset(block, head, position % cache.block_size);
    for (int64_t d = 0; d < cache.head_dim; ++d) {
      dense.push_back(Element(cache.dtype, data, offset + d) * scale);
    }
  }
  return dense;
}

void AttendRow(const AttentionGeometry& geometry, const float* query, int64_t position,
               const std::vector<double>& keys, const std::vector<double>& values, float* out) {
  const int64_t dim = geometry.head_dim;
  const int64_t first = geometry.sliding_window > 0
                            ? std::max<int64_t>(0, position - geometry.sliding_window + 1)
                            : 0;
  std::vector<double> weights;
  double largest = -INFINITY;
  for (int64_t j = first; j <= position; ++j) {
    double logit = 0;
    for (int64_t d = 0; d < dim; ++d) logit += double{query[d]} * keys[j * dim + d];
    logit *= geometry.scale;
    if (geometry.logit_softcap != 0) {
      logit = geometry.logit_softcap * std::tanh(logit / geometry.logit_softcap);
    }
    weights.push_back(logit);
    largest = std::max(largest, logit);
  }
  double sum = 0;
  for (double& weight : weights) sum += weight = std::exp(weight - largest);
  for (int64_t d = 0; d < dim; ++d) {
    double total = 0;
    for (int64_t j = first; j <= position; ++j) total += weights[j - first] * values[j * dim + d];
    out[d] = static_cast<float>(total / sum);
  }
}

}  // namespace

const AttentionCapabilities& ReferenceBackend::Capabilities() {
  static const AttentionCapabilities capabilities = {
      .activation_dtypes = {DType::kF32},
      .kv_dtypes = {DType::kF32, DType::kBF16, DType::kF16, DType::kF8E4M3},
      .max_head_dim = 65536,
      .sliding_window = true,
      .logit_softcap = true,
      .deterministic = true,
  };
  return capabilities;
}

absl::StatusOr<std::unique_ptr<AttentionMetadata>> ReferenceBackend::BuildMetadata(
    const AttentionBatch& batch, int64_t block_size) const {
  LOCKSTEP_RETURN_IF_ERROR(CheckBatch(batch, block_size));
  auto metadata = std::make_unique<ReferenceMetadata>();
  metadata->batch = batch;
  metadata->block_size = block_size;
  metadata->largest_block = LargestBlock(batch, block_size);
  return metadata;
}

void ReferenceBackend::WriteKv(const MatrixView& keys, const MatrixView& values,
                               std::span<const int64_t> slots, const KvCacheView& cache) const {
  CheckWriteArguments(keys, values, slots, cache);
  for (int64_t t = 0; t < keys.rows; ++t) {
    if (slots[t] == kNoSlot) continue;
    for (int64_t head = 0; head < cache.num_kv_heads; ++head) {
      const int64_t offset = SizeOf(cache.dtype) * cache.Offset(slots[t] / cache.block_size, head,
                                                                slots[t] % cache.block_size);
      const int64_t column = head * cache.head_dim;
      ToCache(keys.row<const float>(t) + column, cache.k_scale, cache.dtype,
              static_cast<char*>(cache.keys) + offset, cache.head_dim);
      ToCache(values.row<const float>(t) + column, cache.v_scale, cache.dtype,
              static_cast<char*>(cache.values) + offset, cache.head_dim);
    }
  }
}

void ReferenceBackend::Forward(const AttentionGeometry& geometry, const AttentionMetadata& metadata,
                               const MatrixView& query, const KvCacheView& cache,
                               const MatrixView& out) const {
  const auto* reference = dynamic_cast<const ReferenceMetadata*>(&metadata);
  LOCKSTEP_CHECK(reference != nullptr);
  const AttentionBatch& batch = reference->batch;
  CheckForwardArguments(geometry, query, cache, out, batch.num_tokens());
  LOCKSTEP_CHECK(cache.block_size == reference->block_size);
  LOCKSTEP_CHECK(reference->largest_block < cache.num_blocks);
  for (int64_t b = 0; b < batch.num_requests(); ++b) {
    const int64_t end = batch.query_start_loc[b + 1];
    for (int64_t kv_head = 0; kv_head < geometry.num_kv_heads; ++kv_head) {
      const std::vector<double> keys =
          Gather(*reference, cache, cache.keys, cache.k_scale, b, kv_head);
      const std::vector<double> values =
          Gather(*reference, cache, cache.values, cache.v_scale, b, kv_head);
      const Range group = geometry.kv_groups[kv_head];
      for (int64_t row = batch.query_start_loc[b]; row < end; ++row) {
        for (int64_t head = group.begin; head < group.end; ++head) {
          AttendRow(geometry, query.row<const float>(row) + head * geometry.head_dim,
                    batch.seq_lens[b] - (end - row), keys, values,
                    out.row<float>(row) + head * geometry.head_dim);
        }
      }
    }
  }
  for (int64_t row = batch.query_start_loc.back(); row < out.rows; ++row) {
    std::fill_n(out.row<float>(row), out.cols, 0.0f);
  }
}

}  // namespace lockstep
