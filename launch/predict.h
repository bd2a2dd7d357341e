// `lockstep plan --predict`: memory and speed of a model on 1 to 16 GPUs, from what a step costs
// (model/step_cost.h) and what a GPU reaches (device_rates.h). An estimate: of the slowest rank,
//
//   step = max(weights / weight rate, products / product rate)
//        + max(keys and values / KV rate, attention / attention rate)
//        + sums * (sum_seconds + 2 (N - 1) / N * bytes / link rate) + step_seconds
//
// so nothing runs beside anything else, and the host is hidden behind the device.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "launch/device_rates.h"
#include "model/model_config.h"
#include "model/step_cost.h"

namespace lockstep {

struct PredictOptions {
  std::string device = {};  // as ReadDeviceRates; empty: no prediction
  int64_t batch_size = 32;  // of the decode step that is not of one request
  int64_t context = 1024;   // tokens behind each request of a decode step
  int64_t prompt = 8192;    // tokens of the prefill step
  double memory_utilization = 0.9;
  int64_t block_size = 16;  // KV tokens come in whole blocks
};

inline constexpr int kMaxPredictedRanks = 16;

// Seconds of a step, by part; the parts add up to `total`.
struct StepPrediction {
  double products = 0;
  double attention = 0;
  double sums = 0;
  double rest = 0;
  double total() const { return products + attention + sums + rest; }
};

StepPrediction PredictStep(const StepCost& cost, int tp_size, const DeviceRates& rates);

// A step is none where its tokens do not fit beside the weights.
struct Prediction {
  int tp_size = 0;
  int64_t weight_bytes = 0;  // of the fullest rank
  int64_t kv_tokens = 0;     // that fit beside the weights, minimum over ranks; 0: they do not fit
  std::optional<StepPrediction> decode_one = std::nullopt;
  std::optional<StepPrediction> decode_batch = std::nullopt;
  std::optional<StepPrediction> prefill = std::nullopt;
};

// N = 1 up to kMaxPredictedRanks or the model's query heads.
std::vector<Prediction> Predict(const ModelConfig& config, DType dtype, DType kv_dtype,
                                const PredictOptions& options, const DeviceRates& rates);

// A table with the assumptions below it, and one JSON object on one line.
std::string PredictionText(const std::vector<Prediction>& predictions, const ModelConfig& config,
                           const PredictOptions& options, const DeviceRates& rates);
std::string PredictionJson(const std::vector<Prediction>& predictions,
                           const PredictOptions& options, const DeviceRates& rates);

}  // namespace lockstep
