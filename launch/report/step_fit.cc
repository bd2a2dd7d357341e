#include "launch/report/step_fit.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <utility>

#include "launch/report/html_parts.h"
#include "launch/report/nnls.h"
#include "model/step_cost.h"

namespace lockstep {

namespace {

// A term of which less than this is its own in the measured points is not told apart from others:
// repeats differ by as much.
constexpr double kOwnShare = 0.02;

using Columns = std::vector<std::vector<double>>;

double Norm(const std::vector<double>& v) {
  double squares = 0;
  for (const double x : v) squares += x * x;
  return std::sqrt(squares);
}

// Amounts over times, so that errors are relative, scaled to length 1; the scales go to `norms`.
Columns ScaledColumns(const std::vector<FitPoint>& points, std::vector<double>* norms) {
  Columns columns(kNumFitTerms);
  for (int term = 0; term < kNumFitTerms; ++term) {
    std::vector<double>& column = columns[static_cast<size_t>(term)];
    for (const FitPoint& point : points) column.push_back(point.amounts[term] / point.seconds);
    const double norm = Norm(column);
    norms->push_back(norm);
    for (double& value : column) value = norm > 0 ? value / norm : 0;
  }
  return columns;
}

Columns Pick(const Columns& columns, const std::vector<int>& terms, int without = -1) {
  Columns picked;
  for (const int term : terms) {
    if (term != without) picked.push_back(columns[static_cast<size_t>(term)]);
  }
  return picked;
}

// Terms in order, each kept when the kept ones before do not explain it.
std::vector<int> SeparateTerms(const Columns& columns, StepFit* fit) {
  std::vector<int> kept;
  for (int term = 0; term < kNumFitTerms; ++term) {
    const std::vector<double>& column = columns[static_cast<size_t>(term)];
    FitParameter& parameter = fit->parameters[term];
    if (Norm(column) == 0) {
      parameter.state = FitParameter::State::kNoPoint;
    } else if (UnexplainedShare(column, Pick(columns, kept)) < kOwnShare) {
      parameter.state = FitParameter::State::kNotSeparate;
      for (const int other : kept) {
        if (UnexplainedShare(column, Pick(columns, kept, other)) >= kOwnShare) {
          parameter.not_apart_from.push_back(other);
        }
      }
    } else {
      kept.push_back(term);
    }
  }
  return kept;
}

// sigma / (length of what the other columns do not explain).
void FillStandardErrors(const Columns& columns, const std::vector<double>& norms,
                        const std::vector<int>& kept, StepFit* fit) {
  std::vector<int> fitted;
  for (const int term : kept) {
    if (fit->parameters[term].state == FitParameter::State::kFitted) fitted.push_back(term);
  }
  const int64_t spare = std::ssize(fit->points) - std::ssize(kept);
  if (spare <= 0) return;
  double squares = 0;
  for (const FitPoint& point : fit->points) {
    const double error = FittedSeconds(*fit, point) / point.seconds - 1;
    squares += error * error;
  }
  const double sigma = std::sqrt(squares / static_cast<double>(spare));
  for (const int term : fitted) {
    const auto at = static_cast<size_t>(term);
    const double own = UnexplainedShare(columns[at], Pick(columns, fitted, term));
    fit->parameters[term].standard_error = sigma / (own * norms[at]);
  }
}

// Cores that a rank computes with; 1 on GPUs.
double CoresOfRank(const ReportData& data, const LatencyResult& result) {
  if (result.device != "cpu") return 1;
  const double threads = std::max(1, result.num_threads);
  const int64_t cores = CoresOfRun(data.run);
  if (cores == 0) return threads;
  return std::min(threads, static_cast<double>(cores) / result.num_ranks);
}

int64_t BatchedTokens(const OrderedJson& run) {
  FitSetting setting;
  if (!run.is_object() || !run.contains("engine_options")) return setting.max_num_batched_tokens;
  const std::string name = "--max-num-batched-tokens";
  std::string before;
  for (const OrderedJson& word : run["engine_options"]) {
    if (!word.is_string()) continue;
    const std::string text = word.get<std::string>();
    const std::string value = before == name                 ? text
                              : text.starts_with(name + "=") ? text.substr(name.size() + 1)
                                                             : "";
    if (const int64_t tokens = std::atoll(value.c_str()); tokens > 0) {
      setting.max_num_batched_tokens = tokens;
    }
    before = text;
  }
  return setting.max_num_batched_tokens;
}

std::optional<DType> TypeOf(const std::string& name) {
  for (const DType type : {DType::kF32, DType::kF16, DType::kBF16, DType::kF8E4M3}) {
    if (name == Name(type)) return type;
  }
  return std::nullopt;
}

std::optional<FitSetting> SettingOf(const ReportData& data) {
  const LatencyResult& first = data.latency[0];
  const std::optional<DType> dtype = TypeOf(first.dtype);
  const std::optional<DType> kv_dtype = TypeOf(data.kv_dtype);
  if (!dtype || !kv_dtype) return std::nullopt;
  return FitSetting{.input_len = first.input_len,
                    .output_len = first.output_len,
                    .max_num_batched_tokens = BatchedTokens(data.run),
                    .dtype = *dtype,
                    .kv_dtype = *kv_dtype};
}

const LatencyResult& ResultOf(const ReportData& data, const ScalingRow& row) {
  return *std::find_if(data.latency.begin(), data.latency.end(), [&row](const LatencyResult& r) {
    return r.batch_size == row.batch_size && r.num_ranks == row.num_ranks;
  });
}

}  // namespace

const char* FitTermName(int term) {
  constexpr const char* kNames[kNumFitTerms] = {"bytes", "operations", "host", "sum_latency",
                                                "sum_bytes"};
  return kNames[term];
}

double TermSeconds(const StepFit& fit, const FitPoint& point, int term) {
  return fit.parameters[term].seconds_per_unit * point.amounts[term];
}

double FittedSeconds(const StepFit& fit, const FitPoint& point) {
  double seconds = 0;
  for (int term = 0; term < kNumFitTerms; ++term) seconds += TermSeconds(fit, point, term);
  return seconds;
}

StepFit FitPoints(std::vector<FitPoint> points) {
  StepFit fit;
  fit.points = std::move(points);
  std::set<int> ranks;
  for (const FitPoint& point : fit.points) ranks.insert(point.num_ranks);
  if (ranks.size() < 2) {
    fit.not_made = "No fit is made: it needs results of two numbers of ranks at least.";
    return fit;
  }
  std::vector<double> norms;
  const Columns columns = ScaledColumns(fit.points, &norms);
  const std::vector<int> kept = SeparateTerms(columns, &fit);
  fit.num_fitted = static_cast<int>(kept.size());
  const std::vector<double> scaled =
      NonNegativeLeastSquares(Pick(columns, kept), std::vector<double>(fit.points.size(), 1.0));
  for (size_t k = 0; k < kept.size(); ++k) {
    FitParameter& parameter = fit.parameters[kept[k]];
    parameter.state = scaled[k] > 0 ? FitParameter::State::kFitted : FitParameter::State::kZero;
    parameter.seconds_per_unit = scaled[k] / norms[static_cast<size_t>(kept[k])];
  }
  FillStandardErrors(columns, norms, kept, &fit);
  return fit;
}

std::optional<FitPoint> AmountsOf(const ModelConfig& shape, const FitSetting& setting,
                                  const std::string& phase, int64_t batch_size, int num_ranks,
                                  double cores) {
  const absl::StatusOr<std::vector<RankPartition>> parts = PartitionModel(shape.Dims(), num_ranks);
  if (!parts.ok()) return std::nullopt;
  const bool prefill = phase == "prefill";
  const UniformBatch batch = {
      .requests = batch_size,
      .query_len = prefill ? setting.input_len : 1,
      .seq_len = prefill ? setting.input_len : setting.input_len + setting.output_len / 2};
  const int64_t steps =
      (batch.num_tokens() + setting.max_num_batched_tokens - 1) / setting.max_num_batched_tokens;
  FitPoint point = {.phase = phase, .batch_size = batch_size, .num_ranks = num_ranks};
  const double num_steps = static_cast<double>(steps);
  for (const RankPartition& part : *parts) {
    const StepCost cost =
        CostOfStep(shape, part, num_ranks, setting.dtype, setting.kv_dtype, batch);
    const double amounts[kNumFitTerms] = {
        (cost.weight_bytes * num_steps + cost.kv_bytes) / cores,
        (cost.product_flops + cost.attention_flops) / cores, num_steps,
        static_cast<double>(cost.num_sums) * num_steps,
        static_cast<double>(cost.num_sums) * cost.sum_bytes * 2 * (num_ranks - 1) / num_ranks};
    for (int term = 0; term < kNumFitTerms; ++term) {
      point.amounts[term] = std::max(point.amounts[term], amounts[term]);
    }
  }
  return point;
}

StepFit FitResults(const ReportData& data, const std::vector<ScalingRow>& rows) {
  StepFit fit;
  if (!data.shape) {
    fit.not_made = "No fit is made: there is no plan.json with the model's shape.";
    return fit;
  }
  const std::optional<FitSetting> setting = SettingOf(data);
  if (!setting) {
    fit.not_made = "No fit is made: a type of weights or KV has no known size.";
    return fit;
  }
  std::vector<FitPoint> points;
  for (const ScalingRow& row : rows) {
    std::optional<FitPoint> point =
        AmountsOf(*data.shape, *setting, row.phase, row.batch_size, row.num_ranks,
                  CoresOfRank(data, ResultOf(data, row)));
    if (!point) {
      fit.not_made = absl::StrFormat(
          "No fit is made: plan.json's model cannot be split over %d ranks.", row.num_ranks);
      return fit;
    }
    point->seconds = row.ms / 1000;
    points.push_back(*std::move(point));
  }
  return FitPoints(std::move(points));
}

std::vector<FitPrediction> PredictMore(const ReportData& data, const StepFit& fit,
                                       const std::vector<ScalingRow>& rows) {
  std::vector<FitPrediction> predictions;
  if (!fit.not_made.empty()) return predictions;
  int largest = 0;
  for (const ScalingRow& row : rows) largest = std::max(largest, row.num_ranks);
  const std::optional<FitSetting> setting = SettingOf(data);
  for (const ScalingRow& row : rows) {
    if (row.num_ranks != largest) continue;
    const double base_ms = row.ms * row.speedup;
    for (const int factor : {2, 4}) {
      const int n = largest * factor;
      std::optional<FitPoint> point = AmountsOf(*data.shape, *setting, row.phase, row.batch_size, n,
                                                CoresOfRank(data, ResultOf(data, row)));
      if (!point) continue;
      point->seconds = FittedSeconds(fit, *point);
      if (point->seconds <= 0) continue;
      const double speedup = base_ms / 1000 / point->seconds;
      predictions.push_back({*point, speedup, speedup * row.base_ranks / n});
    }
  }
  return predictions;
}

std::vector<std::string> FitAssumptions(const ReportData& data) {
  std::vector<std::string> assumptions = {
      "Nothing runs beside anything else: reading, computing, summing and the host add up.",
      "More ranks reach each other as fast as those that were measured, and each all-reduce moves "
      "2 (N - 1) / N of its bytes at the same bus bandwidth; beyond one host that is rarely so.",
      "The latency of an all-reduce and the host's time do not grow with N.",
      absl::StrFormat("A step has up to %d tokens; a longer prefill is several steps.",
                      BatchedTokens(data.run))};
  if (data.latency[0].device == "cpu") {
    assumptions.push_back(
        "Ranks beyond those measured bring as many cores, and as much memory bandwidth, as each of "
        "the largest measured N has: more hosts like this one.");
  }
  return assumptions;
}

}  // namespace lockstep
