// A model that explains the measured step times and extrapolates them. Of a batch on N ranks,
//
//   t = bytes / bandwidth + operations / rate
//     + sums * (latency + bytes of a sum * 2 (N - 1) / N / bus bandwidth)      [N > 1]
//     + steps * host
//
// with the bytes (weights and KV) and operations of the fullest rank (model/step_cost.h). The five
// coefficients are fitted to all measured (N, batch size, phase), none below 0, so that the squares
// of the relative errors are least: a decode step counts as much as a prefill that takes a thousand
// times as long.
//
// On GPUs, bandwidth and rate are those of a rank. Ranks on CPUs share the cores of their host:
// there both are those of a core, and a rank has min(threads, cores / N) of them.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "launch/report/report_data.h"
#include "launch/report/scaling.h"

namespace lockstep {

// Coefficients of the model, in this order everywhere; each multiplies a quantity of a point.
inline constexpr int kNumFitTerms = 5;
enum FitTerm { kFitBytes, kFitOperations, kFitHost, kFitSumLatency, kFitSumBytes };
const char* FitTermName(int term);

// What one measured or predicted time is made of, before the coefficients.
struct FitPoint {
  std::string phase;
  int64_t batch_size = 0;
  int num_ranks = 0;
  double amounts[kNumFitTerms] = {};  // bytes, operations, steps, sums, bytes that sums move
  double seconds = 0;                 // measured
};

struct FitParameter {
  enum class State {
    kFitted,
    kZero,         // best at the bound: no time that grows with this amount was seen
    kNoPoint,      // no point has any of this amount
    kNotSeparate,  // in these points a combination of earlier terms: left out, its time is in them
  };
  State state = State::kNoPoint;
  double seconds_per_unit = 0;  // as amounts; 0 unless fitted
  // Of seconds_per_unit, from how far the points lie from the fit. None without spare points.
  std::optional<double> standard_error = std::nullopt;
  std::vector<int> not_apart_from = {};  // kNotSeparate: the terms that have its time
};

struct StepFit {
  std::string not_made;  // why there is none; empty: there is one
  std::vector<FitPoint> points;
  FitParameter parameters[kNumFitTerms];
  int num_fitted = 0;  // parameters that were free: with as many points the errors mean nothing
};

double FittedSeconds(const StepFit& fit, const FitPoint& point);
// Of these, the seconds of one term.
double TermSeconds(const StepFit& fit, const FitPoint& point, int term);

// The coefficients for points of at least two N; otherwise a fit that says why not.
StepFit FitPoints(std::vector<FitPoint> points);

// How the engine ran, as far as the amounts depend on it.
struct FitSetting {
  int64_t input_len = 0;
  int64_t output_len = 0;
  int64_t max_num_batched_tokens = 2048;
  DType dtype = DType::kF32;
  DType kv_dtype = DType::kF32;
};
// Amounts of one point, without a time; bytes and operations are divided by `cores`, those of a
// rank (1 on GPUs). A prefill takes as many steps as its tokens fill, each of which reads all
// weights; a decode step stands in the middle of the answers. None when the model cannot be split
// over so many ranks.
std::optional<FitPoint> AmountsOf(const ModelConfig& shape, const FitSetting& setting,
                                  const std::string& phase, int64_t batch_size, int num_ranks,
                                  double cores);

// From results: the fit, with `not_made` when plan.json is missing or a type has no known size.
StepFit FitResults(const ReportData& data, const std::vector<ScalingRow>& rows);

// Twice and four times the largest measured N, as far as the model can be split so.
struct FitPrediction {
  FitPoint point;      // its seconds are predicted
  double speedup = 0;  // against the measured baseline
  double efficiency = 0;
};
std::vector<FitPrediction> PredictMore(const ReportData& data, const StepFit& fit,
                                       const std::vector<ScalingRow>& rows);

// What the predictions take for granted, a sentence each.
std::vector<std::string> FitAssumptions(const ReportData& data);

}  // namespace lockstep
