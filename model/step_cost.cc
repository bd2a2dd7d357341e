#include "model/step_cost.h"

#include <algorithm>

namespace lockstep {

namespace {

// (query, key) pairs that one request's queries see in a layer; window 0: all keys before.
double VisiblePairs(const UniformBatch& batch, int64_t window) {
  const auto triangle = [](double n) { return n * (n + 1) / 2; };
  const double first = static_cast<double>(batch.seq_len - batch.query_len);
  const double last = static_cast<double>(batch.seq_len);
  const double all = triangle(last) - triangle(first);
  if (window <= 0) return all;
  // The query at position p, from 0, sees min(p + 1, window) keys.
  const double w = static_cast<double>(window);
  const double beyond = std::max(0.0, last - std::max(first, w));
  const double full = triangle(std::min(last, std::max(first, w))) - triangle(first);
  return full + beyond * w;
}

// Keys of a layer that some query of the request sees.
double VisibleKeys(const UniformBatch& batch, int64_t window) {
  const int64_t first =
      window <= 0 ? 0 : std::max<int64_t>(0, batch.seq_len - batch.query_len + 1 - window);
  return static_cast<double>(batch.seq_len - first);
}

}  // namespace

StepCost CostOfStep(const ModelConfig& config, const RankPartition& part, int tp_size, DType dtype,
                    DType kv_dtype, const UniformBatch& batch) {
  const double hidden = static_cast<double>(config.hidden_size);
  const double head_dim = static_cast<double>(config.head_dim);
  const double q_rows = static_cast<double>(part.query_heads.size()) * head_dim;
  const double kv_rows = static_cast<double>(part.kv_heads.size()) * head_dim;
  const double layers = static_cast<double>(config.num_layers);
  const double layer_weights =
      hidden * (2 * q_rows + 2 * kv_rows + 3 * static_cast<double>(part.intermediate.size()));
  const double head_weights = hidden * static_cast<double>(part.vocab.size());
  const double requests = static_cast<double>(batch.requests);
  const double tokens = static_cast<double>(batch.num_tokens());

  StepCost cost;
  cost.weight_bytes = (layers * layer_weights + head_weights) * static_cast<double>(SizeOf(dtype));
  cost.product_flops = 2 * (tokens * layers * layer_weights + requests * head_weights);
  for (int64_t l = 0; l < config.num_layers; ++l) {
    const int64_t window =
        config.layer_windows.empty() ? 0 : config.layer_windows[static_cast<size_t>(l)];
    cost.kv_bytes +=
        requests * VisibleKeys(batch, window) * 2 * kv_rows * static_cast<double>(SizeOf(kv_dtype));
    cost.attention_flops += 4 * requests * VisiblePairs(batch, window) * q_rows;
  }
  if (tp_size > 1) {
    cost.num_sums = 2 * config.num_layers + 1;
    cost.sum_bytes = tokens * hidden * static_cast<double>(SizeOf(dtype));
  }
  return cost;
}

}  // namespace lockstep
