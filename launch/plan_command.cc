#include "launch/plan_command.h"

#include <algorithm>

#include "launch/device_rates.h"
#include "launch/result_writer.h"
#include "launch/text_table.h"
#include "model/checkpoint/checkpoint.h"
#include "runtime/core/json.h"
#include "runtime/core/log.h"
#include "runtime/kv_budget.h"

namespace lockstep {

namespace {

constexpr double kGib = 1024.0 * 1024.0 * 1024.0;
constexpr double kMaxMemoryGib = 1e9;  // keeps byte counts well inside int64_t

// The same rule as the engine's: there is no float16 arithmetic yet.
DType ResolveDType(const ModelConfig& config, const PlanOptions& options) {
  const DType dtype = options.dtype.value_or(config.dtype);
  return dtype == DType::kF16 ? DType::kF32 : dtype;
}

// Of one rank, in whole blocks.
std::optional<int64_t> TokensThatFit(const PlanOptions& options, const RankPlan& rank) {
  const int64_t bytes_per_block = rank.kv_bytes_per_token * options.block_size;
  if (options.memory_gib.has_value()) {
    const int64_t free_bytes = static_cast<int64_t>(*options.memory_gib * kGib) - rank.weight_bytes;
    return free_bytes <= 0 ? 0 : free_bytes / bytes_per_block * options.block_size;
  }
  if (!options.kv_cache_memory_bytes.has_value()) return std::nullopt;
  EngineOptions engine;
  engine.kv_cache_memory_bytes = *options.kv_cache_memory_bytes;
  const int64_t blocks = LocalNumBlocks(engine, /*wanted_model_len=*/1, bytes_per_block,
                                        /*free_host_bytes=*/0, options.tp_size);
  return blocks * options.block_size;
}

OrderedJson RangeJson(Range range) { return {range.begin, range.end}; }

OrderedJson TokensJson(std::optional<int64_t> tokens) {
  return tokens ? OrderedJson(*tokens) : OrderedJson(nullptr);
}

int64_t TotalWeightBytes(const ModelPlan& plan) {
  int64_t bytes = 0;
  for (const RankPlan& rank : plan.ranks) bytes += rank.weight_bytes;
  return bytes;
}

std::string JsonText(const ModelPlan& plan, const PlanOptions& options) {
  OrderedJson json;
  json["model"] = options.model;
  json["model_type"] = plan.config.model_type;
  json["tp_size"] = plan.ranks.size();
  json["dtype"] = std::string(Name(plan.dtype));
  json["kv_cache_dtype"] = std::string(Name(plan.kv_dtype));
  json["block_size"] = options.block_size;
  json["memory_gib"] = options.memory_gib ? OrderedJson(*options.memory_gib) : OrderedJson(nullptr);
  json["kv_cache_memory_bytes"] = options.kv_cache_memory_bytes
                                      ? OrderedJson(*options.kv_cache_memory_bytes)
                                      : OrderedJson(nullptr);
  json["num_layers"] = plan.config.num_layers;
  json["num_query_heads"] = plan.config.num_query_heads;
  json["num_kv_heads"] = plan.config.num_kv_heads;
  json["head_dim"] = plan.config.head_dim;
  json["hidden_size"] = plan.config.hidden_size;
  json["intermediate_size"] = plan.config.intermediate_size;
  json["vocab_size"] = plan.config.vocab_size;
  json["layer_windows"] = plan.config.layer_windows;
  json["weight_bytes"] = TotalWeightBytes(plan);
  json["tokens"] = TokensJson(plan.tokens);
  json["ranks"] = OrderedJson::array();
  for (size_t rank = 0; rank < plan.ranks.size(); ++rank) {
    const RankPlan& one = plan.ranks[rank];
    OrderedJson entry;
    entry["rank"] = rank;
    entry["query_heads"] = RangeJson(one.part.query_heads);
    entry["kv_heads"] = RangeJson(one.part.kv_heads);
    entry["intermediate_rows"] = RangeJson(one.part.intermediate);
    entry["vocab_rows"] = RangeJson(one.part.vocab);
    entry["weight_bytes"] = one.weight_bytes;
    entry["kv_bytes_per_token"] = one.kv_bytes_per_token;
    entry["tokens"] = TokensJson(one.tokens);
    json["ranks"].push_back(std::move(entry));
  }
  return DumpJson(json) + "\n";
}

// "0-4 (5)": first and last, and how many.
std::string RangeText(Range range) {
  return absl::StrFormat("%d-%d (%d)", range.begin, range.end - 1, range.size());
}

using Row = std::vector<std::string>;

std::string MemoryText(const PlanOptions& options) {
  if (options.memory_gib) return absl::StrFormat("%g GiB a rank", *options.memory_gib);
  return absl::StrFormat("%d bytes of KV memory for %d rank%s", *options.kv_cache_memory_bytes,
                         options.tp_size, options.tp_size == 1 ? "" : "s");
}

std::string TableText(const ModelPlan& plan, const PlanOptions& options) {
  const ModelConfig& config = plan.config;
  std::string text = absl::StrFormat(
      "%s: %s, %d layers, %d query heads, %d KV heads of %d, %d rows of the MLP, vocabulary %d\n"
      "%d rank%s, weights in %s, KV in %s, %.3f GiB of weights in all\n\n",
      options.model, config.model_type, config.num_layers, config.num_query_heads,
      config.num_kv_heads, config.head_dim, config.intermediate_size, config.vocab_size,
      plan.ranks.size(), plan.ranks.size() == 1 ? "" : "s", Name(plan.dtype), Name(plan.kv_dtype),
      static_cast<double>(TotalWeightBytes(plan)) / kGib);
  std::vector<Row> rows = {{"rank", "query heads", "KV heads", "MLP rows", "vocabulary rows",
                            "weight bytes", "KV bytes a token"}};
  if (plan.tokens) rows[0].push_back("tokens that fit");
  for (size_t rank = 0; rank < plan.ranks.size(); ++rank) {
    const RankPlan& one = plan.ranks[rank];
    rows.push_back({absl::StrCat(rank), RangeText(one.part.query_heads),
                    RangeText(one.part.kv_heads), RangeText(one.part.intermediate),
                    RangeText(one.part.vocab), absl::StrCat(one.weight_bytes),
                    absl::StrCat(one.kv_bytes_per_token)});
    if (one.tokens) rows.back().push_back(absl::StrCat(*one.tokens));
  }
  absl::StrAppend(&text, TextTable(rows));
  if (plan.tokens) {
    absl::StrAppend(&text, absl::StrFormat("\n%d tokens fit in %s (blocks of %d)\n", *plan.tokens,
                                           MemoryText(options), options.block_size));
  }
  return text;
}

absl::StatusOr<ModelPlan> OpenAndPlan(const PlanOptions& options) {
  LOCKSTEP_ASSIGN_OR_RETURN(const ModelConfig config, OpenModelConfig(options.model));
  absl::StatusOr<ModelPlan> plan = MakePlan(config, options);
  if (!plan.ok()) return Annotate(plan.status(), options.model);
  return plan;
}

absl::StatusOr<std::string> PredictedText(const PlanOptions& options) {
  LOCKSTEP_ASSIGN_OR_RETURN(const ModelConfig config, OpenModelConfig(options.model));
  LOCKSTEP_ASSIGN_OR_RETURN(const DeviceRates rates, ReadDeviceRates(options.predict.device));
  const DType dtype = options.dtype.value_or(config.dtype);
  if (dtype == DType::kF32) {
    return absl::InvalidArgumentError(
        options.model + ": a GPU's rates are those of 16-bit weights: add --dtype bfloat16");
  }
  PredictOptions predict = options.predict;
  predict.block_size = options.block_size;
  if (std::max(predict.context, predict.prompt) > config.max_position_embeddings) {
    LogWarning(absl::StrFormat(
        "the model was made for %d positions: --context %d or --prompt-len %d goes beyond",
        config.max_position_embeddings, predict.context, predict.prompt));
  }
  const std::vector<Prediction> predictions =
      Predict(config, dtype, options.kv_cache_dtype.value_or(dtype), predict, rates);
  return options.json ? PredictionJson(predictions, predict, rates)
                      : PredictionText(predictions, config, predict, rates);
}

}  // namespace

int64_t WeightBytes(const ModelConfig& config, const RankPartition& part, int rank, DType dtype) {
  const int64_t hidden = config.hidden_size;
  const int64_t q_rows = part.query_heads.size() * config.head_dim;
  const int64_t qkv_rows = q_rows + 2 * part.kv_heads.size() * config.head_dim;
  const int64_t mlp_rows = part.intermediate.size();

  const int64_t layer_weights = hidden * (qkv_rows + q_rows + 3 * mlp_rows);
  int64_t layer_f32 = 2 * hidden;  // the two norms
  if (config.qk_norm) layer_f32 += 2 * config.head_dim;
  if (config.qkv_bias) layer_f32 += qkv_rows;
  if (config.o_bias && rank == 0) layer_f32 += hidden;
  if (config.mlp_bias) layer_f32 += 2 * mlp_rows + (rank == 0 ? hidden : 0);

  const int64_t vocab_matrices = config.tie_word_embeddings ? 1 : 2;
  const int64_t weights =
      config.num_layers * layer_weights + vocab_matrices * part.vocab.size() * hidden;
  const int64_t f32 = config.num_layers * layer_f32 + hidden;  // and the final norm
  return weights * SizeOf(dtype) + f32 * SizeOf(DType::kF32);
}

int64_t KvBytesPerToken(const ModelConfig& config, const RankPartition& part, DType dtype) {
  return 2 * config.num_layers * part.kv_heads.size() * config.head_dim * SizeOf(dtype);
}

absl::Status CheckPlanOptions(const PlanOptions& options) {
  if (!options.predict.device.empty() &&
      (options.tp_size != 1 || options.memory_gib || options.kv_cache_memory_bytes)) {
    return absl::InvalidArgumentError(
        "--predict says itself for how many ranks and which memory: leave --tp, --memory-gib and "
        "--kv-cache-memory out");
  }
  if (options.block_size < 1) {
    return absl::InvalidArgumentError(
        absl::StrFormat("the block size must be at least 1, not %d", options.block_size));
  }
  if (options.memory_gib && !(*options.memory_gib > 0 && *options.memory_gib <= kMaxMemoryGib)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("the memory of a rank must be above 0 and at most %g GiB, not %g",
                        kMaxMemoryGib, *options.memory_gib));
  }
  if (options.memory_gib && options.kv_cache_memory_bytes) {
    return absl::InvalidArgumentError(
        "--memory-gib, which holds the weights too, and --kv-cache-memory exclude each other");
  }
  if (options.kv_cache_memory_bytes && *options.kv_cache_memory_bytes < 1) {
    return absl::InvalidArgumentError("the KV cache memory must be at least 1 byte");
  }
  return absl::OkStatus();
}

absl::StatusOr<ModelPlan> MakePlan(const ModelConfig& config, const PlanOptions& options) {
  LOCKSTEP_RETURN_IF_ERROR(CheckPlanOptions(options));
  LOCKSTEP_ASSIGN_OR_RETURN(const std::vector<RankPartition> parts,
                            PartitionModel(config.Dims(), options.tp_size));
  const DType dtype = ResolveDType(config, options);
  ModelPlan plan = {
      .config = config, .dtype = dtype, .kv_dtype = options.kv_cache_dtype.value_or(dtype)};
  for (size_t rank = 0; rank < parts.size(); ++rank) {
    RankPlan one = {.part = parts[rank]};
    one.weight_bytes = WeightBytes(config, one.part, static_cast<int>(rank), plan.dtype);
    one.kv_bytes_per_token = KvBytesPerToken(config, one.part, plan.kv_dtype);
    one.tokens = TokensThatFit(options, one);
    if (one.tokens) {
      plan.tokens = std::min(plan.tokens.value_or(*one.tokens), *one.tokens);
    }
    plan.ranks.push_back(std::move(one));
  }
  return plan;
}

std::string FormatPlan(const ModelPlan& plan, const PlanOptions& options) {
  return options.json ? JsonText(plan, options) : TableText(plan, options);
}

int RunPlan(const PlanOptions& options) {
  if (!options.predict.device.empty()) {
    const absl::StatusOr<std::string> text = PredictedText(options);
    if (text.ok()) return PrintResult(*text);
    Log(LogLevel::kError, std::string(text.status().message()));
    return 2;
  }
  const absl::StatusOr<ModelPlan> plan = OpenAndPlan(options);
  if (!plan.ok()) {
    Log(LogLevel::kError, std::string(plan.status().message()));
    return 2;
  }
  if (plan->tokens == 0) {
    LogWarning(absl::StrFormat("%s cannot hold %sone KV block of %d tokens", MemoryText(options),
                               options.memory_gib ? "the weights and " : "", options.block_size));
  }
  return PrintResult(FormatPlan(*plan, options));
}

}  // namespace lockstep
