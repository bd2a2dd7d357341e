// `lockstep plan`: how a model is split over N ranks, from its configuration alone. No weights, no
// MPI, no allocation.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "launch/predict.h"
#include "model/model_config.h"
#include "parallel/partition.h"

namespace lockstep {

// Every member has an initialiser, so that those left out of a designated list raise no warning.
struct PlanOptions {
  std::string model = {};
  int tp_size = 1;
  std::optional<double> memory_gib = std::nullopt;  // of a rank, weights included; above 0
  // Of the host that holds all ranks, for KV alone (EngineOptions); not with memory_gib.
  std::optional<int64_t> kv_cache_memory_bytes = std::nullopt;
  int64_t block_size = 16;                             // P
  std::optional<DType> dtype = std::nullopt;           // of weights; none: auto
  std::optional<DType> kv_cache_dtype = std::nullopt;  // of KV; none: as the weights
  PredictOptions predict = {};                         // device empty: the plan itself
  bool json = false;
};

// For the help: what the numbers mean.
inline constexpr char kPlanMemoryHelp[] =
    "Memory of a rank in GiB. Tokens that fit on a rank = floor((X * 2^30 - weight bytes) / "
    "(KV bytes a token * P)) * P, where P is the block size; the job's is the minimum over ranks. "
    "Memory for activations, which depends on the batch, comes on top.";
inline constexpr char kPlanKvMemoryHelp[] =
    "KV memory of one host that runs all N ranks, as generate --kv-cache-memory: tokens that fit "
    "on a rank = floor(BYTES / N / (KV bytes a token * P)) * P. Not with --memory-gib.";
inline constexpr char kPlanJsonHelp[] =
    "One JSON object on one line: model, model_type, tp_size, dtype, kv_cache_dtype, block_size, "
    "memory_gib, kv_cache_memory_bytes, num_layers, num_query_heads, num_kv_heads, head_dim, "
    "hidden_size, intermediate_size, vocab_size, layer_windows (tokens, 0: full attention; empty: "
    "all full), weight_bytes (sum over ranks), tokens (of the job), and ranks, "
    "a list of {rank, query_heads, kv_heads, intermediate_rows, vocab_rows, weight_bytes, "
    "kv_bytes_per_token, tokens}. Ranges are [begin, end) in the model's numbering; tokens are "
    "null without --memory-gib and --kv-cache-memory, and so is what was not given.";

// Bytes of the weights a rank stores: embedding rows (and, unless tied, head rows) of its part of
// the vocabulary; of each layer the rows of q, k, v, gate and up and the columns of o and down that
// are its own, in `dtype`; and in float32 the norms, whole, the biases of its own rows, and on rank
// 0 alone the biases after o and down, which count once.
int64_t WeightBytes(const ModelConfig& config, const RankPartition& part, int rank, DType dtype);

// Keys and values of one token in all layers: 2 * L * Hkv_local * D * SizeOf(dtype).
int64_t KvBytesPerToken(const ModelConfig& config, const RankPartition& part, DType dtype);

struct RankPlan {
  RankPartition part = {};
  int64_t weight_bytes = 0;
  int64_t kv_bytes_per_token = 0;
  std::optional<int64_t> tokens =
      std::nullopt;  // that fit; whole blocks, 0 when the weights alone do not fit
};

struct ModelPlan {
  ModelConfig config = {};
  DType dtype = DType::kF32;
  DType kv_dtype = DType::kF32;
  std::vector<RankPlan> ranks = {};
  std::optional<int64_t> tokens = std::nullopt;  // minimum over ranks
};

absl::Status CheckPlanOptions(const PlanOptions& options);

// InvalidArgument for more ranks than the model allows and for options outside their limits.
absl::StatusOr<ModelPlan> MakePlan(const ModelConfig& config, const PlanOptions& options);

// What the command prints: a table, or with options.json one line.
std::string FormatPlan(const ModelPlan& plan, const PlanOptions& options);

// Exit status.
int RunPlan(const PlanOptions& options);

}  // namespace lockstep
