// How many KV blocks the engine has, and the longest request that follows from it.
#pragma once

#include <cstdint>
#include <span>

#include "model/model_config.h"
#include "runtime/core/status.h"
#include "runtime/engine.h"

namespace lockstep {

// The longest request this run aims for: options.max_model_len, or max_position_embeddings where
// that is 0. InvalidArgument, with both numbers, when more is asked than the positions the model
// was made for (max_position_embeddings, times the factor of a linear, dynamic or YaRN scaling).
absl::StatusOr<int64_t> WantedModelLen(const EngineOptions& options, const ModelConfig& config);

// Blocks for one rank: options.num_gpu_blocks_override, else options.kv_cache_memory_bytes shared
// by the host's ranks, else automatic: 4 GiB a host, or one request of `wanted_model_len` if that
// is more, but no more than max_num_seqs such requests or a quarter of the host's free memory.
// Memory that is not used yet is address space only.
int64_t LocalNumBlocks(const EngineOptions& options, int64_t wanted_model_len,
                       int64_t bytes_per_block, int64_t free_host_bytes, int ranks_on_host);

// Blocks for one GPU: options.num_gpu_blocks_override, else options.kv_cache_memory_bytes, else
// what gpu_memory_utilization of `total_bytes` leaves beside what is in use (total - free).
int64_t LocalNumCudaBlocks(const EngineOptions& options, int64_t bytes_per_block,
                           int64_t free_bytes, int64_t total_bytes);

struct KvBudget {
  int64_t num_blocks = 0;  // the minimum over ranks
  int limiting_rank = 0;   // the first with that many
  int64_t max_model_len = 0;
};
// ResourceExhausted, with the numbers, when the memory holds not even one block, or fewer tokens
// than an explicit options.max_model_len. A default maximum length shrinks to what fits.
absl::StatusOr<KvBudget> MakeKvBudget(const EngineOptions& options, int64_t wanted_model_len,
                                      std::span<const int64_t> blocks_per_rank);

}  // namespace lockstep
