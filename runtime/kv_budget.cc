#include "runtime/kv_budget.h"

#include <algorithm>
#include <cmath>

#include "cache/block_table.h"

namespace lockstep {

namespace {

// Memory of a host that the KV cache takes unless told otherwise.
constexpr int64_t kUsualKvBytes = int64_t{4} << 30;

int64_t ModelPositions(const ModelConfig& config) {
  const RopeConfig& rope = config.rope;
  const double positions = static_cast<double>(config.max_position_embeddings);
  const double trained = static_cast<double>(rope.original_max_position_embeddings);
  double limit = positions;
  switch (rope.type) {
    case RopeType::kPlain:
    case RopeType::kLlama3:  // max_position_embeddings is the extended length
      break;
    case RopeType::kLinear:
    case RopeType::kDynamic:
      limit = positions * std::max(1.0, rope.factor);
      break;
    case RopeType::kYarn:
      limit = std::max(positions, trained * rope.factor);
      break;
  }
  return static_cast<int64_t>(std::floor(limit));
}

}  // namespace

absl::StatusOr<int64_t> WantedModelLen(const EngineOptions& options, const ModelConfig& config) {
  if (options.max_model_len == 0) return config.max_position_embeddings;
  const int64_t positions = ModelPositions(config);
  if (options.max_model_len > positions) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "max_model_len %d is more than the %d positions of the model (max_position_embeddings %d)",
        options.max_model_len, positions, config.max_position_embeddings));
  }
  return options.max_model_len;
}

int64_t LocalNumBlocks(const EngineOptions& options, int64_t wanted_model_len,
                       int64_t bytes_per_block, int64_t free_host_bytes, int ranks_on_host) {
  if (options.num_gpu_blocks_override > 0) return options.num_gpu_blocks_override;
  if (options.kv_cache_memory_bytes > 0) {
    return options.kv_cache_memory_bytes / ranks_on_host / bytes_per_block;
  }
  const int64_t one_sequence = BlocksForTokens(wanted_model_len, options.block_size);
  const int64_t usual = kUsualKvBytes / ranks_on_host / bytes_per_block;
  return std::min({std::max(one_sequence, usual), one_sequence * options.max_num_seqs,
                   free_host_bytes / 4 / ranks_on_host / bytes_per_block});
}

int64_t LocalNumCudaBlocks(const EngineOptions& options, int64_t bytes_per_block,
                           int64_t free_bytes, int64_t total_bytes) {
  if (options.num_gpu_blocks_override > 0) return options.num_gpu_blocks_override;
  if (options.kv_cache_memory_bytes > 0) return options.kv_cache_memory_bytes / bytes_per_block;
  const double allowed = options.gpu_memory_utilization * static_cast<double>(total_bytes);
  const int64_t left = static_cast<int64_t>(allowed) - (total_bytes - free_bytes);
  return std::max<int64_t>(0, left) / bytes_per_block;
}

absl::StatusOr<KvBudget> MakeKvBudget(const EngineOptions& options, int64_t wanted_model_len,
                                      std::span<const int64_t> blocks_per_rank) {
  const auto least = std::min_element(blocks_per_rank.begin(), blocks_per_rank.end());
  KvBudget budget;
  budget.num_blocks = *least;
  budget.limiting_rank = static_cast<int>(least - blocks_per_rank.begin());
  const int64_t tokens = budget.num_blocks * options.block_size;
  budget.max_model_len = std::min(wanted_model_len, tokens);
  // Who names a number of blocks means it: the maximum length follows.
  if (options.num_gpu_blocks_override > 0) return budget;
  const char* remedy = options.kv_cache_memory_bytes > 0
                           ? "raise the KV cache memory"
                           : "free memory, or set the KV cache memory explicitly";
  if (budget.num_blocks == 0) {
    return absl::ResourceExhaustedError(
        absl::StrFormat("the KV cache memory of rank %d holds no block of %d tokens: %s",
                        budget.limiting_rank, options.block_size, remedy));
  }
  if (options.max_model_len > tokens) {
    return absl::ResourceExhaustedError(absl::StrFormat(
        "max_model_len is %d, but the KV cache memory of rank %d holds %d tokens: lower it, or %s",
        options.max_model_len, budget.limiting_rank, tokens, remedy));
  }
  return budget;
}

}  // namespace lockstep
