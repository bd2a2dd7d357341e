#include "launch/predict.h"

#include <algorithm>
#include <cmath>

#include "launch/plan_command.h"
#include "launch/text_table.h"

namespace lockstep {

namespace {

// Of the ranks the one whose step takes longest.
StepPrediction PredictSlowest(const ModelConfig& config, const std::vector<RankPartition>& parts,
                              DType dtype, DType kv_dtype, const UniformBatch& batch,
                              const DeviceRates& rates) {
  const int tp_size = static_cast<int>(parts.size());
  StepPrediction slowest;
  for (const RankPartition& part : parts) {
    const StepPrediction one =
        PredictStep(CostOfStep(config, part, tp_size, dtype, kv_dtype, batch), tp_size, rates);
    if (one.total() > slowest.total()) slowest = one;
  }
  return slowest;
}

std::string Milliseconds(double seconds) { return absl::StrFormat("%.2f", seconds * 1e3); }

OrderedJson StepJson(const std::optional<StepPrediction>& step, int64_t tokens) {
  if (!step) return nullptr;
  OrderedJson json;
  json["seconds"] = step->total();
  json["tokens_per_second"] = static_cast<double>(tokens) / step->total();
  json["products_seconds"] = step->products;
  json["attention_seconds"] = step->attention;
  json["sums_seconds"] = step->sums;
  json["rest_seconds"] = step->rest;
  return json;
}

using Step = std::optional<StepPrediction> Prediction::*;

// Three cells: milliseconds, tokens a second, and how many times as fast as on the fewest GPUs on
// which the step fits.
void AddCells(const std::vector<Prediction>& all, const Prediction& one, Step step, int64_t tokens,
              std::vector<std::string>& row) {
  if (!(one.*step).has_value()) {
    row.insert(row.end(), 3, "-");
    return;
  }
  const auto base = std::find_if(all.begin(), all.end(),
                                 [step](const Prediction& p) { return (p.*step).has_value(); });
  const double seconds = (one.*step)->total();
  row.push_back(Milliseconds(seconds));
  row.push_back(absl::StrFormat("%.0f", static_cast<double>(tokens) / seconds));
  row.push_back(absl::StrFormat("%.2f", ((*base).*step)->total() / seconds));
}

}  // namespace

StepPrediction PredictStep(const StepCost& cost, int tp_size, const DeviceRates& rates) {
  StepPrediction step;
  step.products = std::max(cost.weight_bytes / rates.weight_bytes_per_second,
                           cost.product_flops / rates.product_flops);
  step.attention = std::max(cost.kv_bytes / rates.kv_bytes_per_second,
                            cost.attention_flops / rates.attention_flops);
  const double moved = 2.0 * (tp_size - 1) / tp_size * cost.sum_bytes;
  step.sums = static_cast<double>(cost.num_sums) *
              (rates.sum_seconds + moved / rates.link_bytes_per_second);
  step.rest = rates.step_seconds;
  return step;
}

std::vector<Prediction> Predict(const ModelConfig& config, DType dtype, DType kv_dtype,
                                const PredictOptions& options, const DeviceRates& rates) {
  std::vector<Prediction> predictions;
  for (int n = 1; n <= kMaxPredictedRanks; ++n) {
    const absl::StatusOr<std::vector<RankPartition>> parts = PartitionModel(config.Dims(), n);
    if (!parts.ok()) break;  // more ranks than query heads, and so for every larger N
    Prediction one;
    one.tp_size = n;
    one.kv_tokens = INT64_MAX;
    for (int rank = 0; rank < n; ++rank) {
      const RankPartition& part = (*parts)[static_cast<size_t>(rank)];
      const int64_t weights = WeightBytes(config, part, rank, dtype);
      const double free =
          rates.memory_bytes * options.memory_utilization - static_cast<double>(weights);
      const double block_bytes =
          static_cast<double>(KvBytesPerToken(config, part, kv_dtype) * options.block_size);
      const double blocks = std::max(0.0, std::floor(free / block_bytes));
      one.weight_bytes = std::max(one.weight_bytes, weights);
      // Of a description's largest memory, too, this is far below 2^63.
      one.kv_tokens = std::min(one.kv_tokens,
                               static_cast<int64_t>(std::min(blocks, 1e15)) * options.block_size);
    }
    const auto predict = [&](const UniformBatch& batch) -> std::optional<StepPrediction> {
      if (static_cast<double>(batch.requests) * static_cast<double>(batch.seq_len) >
          static_cast<double>(one.kv_tokens)) {
        return std::nullopt;
      }
      return PredictSlowest(config, *parts, dtype, kv_dtype, batch, rates);
    };
    one.decode_one = predict({.seq_len = options.context});
    one.decode_batch = predict({.requests = options.batch_size, .seq_len = options.context});
    one.prefill = predict({.query_len = options.prompt, .seq_len = options.prompt});
    predictions.push_back(one);
  }
  return predictions;
}

std::string PredictionText(const std::vector<Prediction>& predictions, const ModelConfig& config,
                           const PredictOptions& options, const DeviceRates& rates) {
  std::vector<std::vector<std::string>> rows = {
      {"GPUs", "GB of weights", "KV tokens", "decode 1: ms", "tokens/s", "times",
       absl::StrFormat("decode %d: ms", options.batch_size), "tokens/s", "times",
       absl::StrFormat("prefill %d: ms", options.prompt), "tokens/s", "times"}};
  for (const Prediction& one : predictions) {
    std::vector<std::string> row = {
        absl::StrCat(one.tp_size),
        absl::StrFormat("%.1f", static_cast<double>(one.weight_bytes) / 1e9),
        one.kv_tokens == 0 ? "do not fit" : absl::StrCat(one.kv_tokens)};
    AddCells(predictions, one, &Prediction::decode_one, 1, row);
    AddCells(predictions, one, &Prediction::decode_batch, options.batch_size, row);
    AddCells(predictions, one, &Prediction::prefill, options.prompt, row);
    rows.push_back(std::move(row));
  }
  std::string text = absl::StrFormat(
      "Predicted, not measured, for GPUs like %s; weights and tokens are those of one GPU\n\n%s",
      rates.name, TextTable(rows));
  if (std::ssize(predictions) < kMaxPredictedRanks) {
    absl::StrAppend(
        &text, absl::StrFormat("\nNo more ranks than query heads: %d\n", config.num_query_heads));
  }
  absl::StrAppend(
      &text,
      absl::StrFormat(
          "\nAssumed: decode behind %d tokens a request; nothing runs beside anything else, but "
          "the "
          "host beside the GPU;\nof a GPU %.1f GB, of which %g for weights and KV; weights at %.2f "
          "TB/s, KV at %.2f TB/s; products %.0f\nTFLOP/s, attention %.0f TFLOP/s; a sum over ranks "
          "%.1f us and 2 (N - 1) / N of its bytes at %.0f GB/s; %.0f us\nof everything else a "
          "step. "
          "All GPUs reach each other at that speed: beyond one host they rarely do.\n",
          options.context, rates.memory_bytes / 1e9, options.memory_utilization,
          rates.weight_bytes_per_second / 1e12, rates.kv_bytes_per_second / 1e12,
          rates.product_flops / 1e12, rates.attention_flops / 1e12, rates.sum_seconds * 1e6,
          rates.link_bytes_per_second / 1e9, rates.step_seconds * 1e6));
  return text;
}

std::string PredictionJson(const std::vector<Prediction>& predictions,
                           const PredictOptions& options, const DeviceRates& rates) {
  OrderedJson json;
  json["predicted"] = true;
  json["device"] = DeviceRatesJson(rates);
  json["batch_size"] = options.batch_size;
  json["context"] = options.context;
  json["prompt"] = options.prompt;
  json["gpu_memory_utilization"] = options.memory_utilization;
  json["ranks"] = OrderedJson::array();
  for (const Prediction& one : predictions) {
    OrderedJson entry;
    entry["tp_size"] = one.tp_size;
    entry["weight_bytes"] = one.weight_bytes;
    entry["kv_tokens"] = one.kv_tokens;
    entry["decode_one"] = StepJson(one.decode_one, 1);
    entry["decode_batch"] = StepJson(one.decode_batch, options.batch_size);
    entry["prefill"] = StepJson(one.prefill, options.prompt);
    json["ranks"].push_back(std::move(entry));
  }
  return DumpJson(json) + "\n";
}

}  // namespace lockstep
