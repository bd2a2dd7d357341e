#include "launch/report/report.h"

namespace lockstep {

namespace {

const char* StateName(FitParameter::State state) {
  switch (state) {
    case FitParameter::State::kFitted:
      return "fitted";
    case FitParameter::State::kZero:
      return "zero";
    case FitParameter::State::kNoPoint:
      return "no_point";
    case FitParameter::State::kNotSeparate:
      return "not_separate";
  }
  LOCKSTEP_CHECK(false);
}

OrderedJson ParameterJson(const StepFit& fit, int term) {
  constexpr const char* kUnits[kNumFitTerms] = {"s/byte", "s/operation", "s/step", "s/all-reduce",
                                                "s/byte"};
  const FitParameter& parameter = fit.parameters[term];
  OrderedJson json;
  json["name"] = FitTermName(term);
  json["state"] = StateName(parameter.state);
  json["value"] = parameter.seconds_per_unit;
  json["unit"] = kUnits[term];
  json["standard_error"] =
      parameter.standard_error ? OrderedJson(*parameter.standard_error) : OrderedJson(nullptr);
  json["not_apart_from"] = OrderedJson::array();
  for (const int other : parameter.not_apart_from) {
    json["not_apart_from"].push_back(FitTermName(other));
  }
  return json;
}

OrderedJson PointJson(const StepFit& fit, const FitPoint& point) {
  OrderedJson json;
  json["phase"] = point.phase;
  json["batch_size"] = point.batch_size;
  json["num_ranks"] = point.num_ranks;
  json["fitted_ms"] = FittedSeconds(fit, point) * 1000;
  for (int term = 0; term < kNumFitTerms; ++term) {
    json["parts_ms"][FitTermName(term)] = TermSeconds(fit, point, term) * 1000;
  }
  return json;
}

}  // namespace

OrderedJson FitJson(const Report& report) {
  const StepFit& fit = report.fit;
  OrderedJson json;
  json["made"] = fit.not_made.empty();
  if (!fit.not_made.empty()) {
    json["why_not"] = fit.not_made;
    return json;
  }
  json["num_points"] = fit.points.size();
  json["num_free_parameters"] = fit.num_fitted;
  // On CPUs rates are those of a core.
  json["rates_of"] = report.data.latency[0].device == "cpu" ? "core" : "rank";
  json["parameters"] = OrderedJson::array();
  for (int term = 0; term < kNumFitTerms; ++term) {
    json["parameters"].push_back(ParameterJson(fit, term));
  }
  json["points"] = OrderedJson::array();
  for (const FitPoint& point : fit.points) {
    OrderedJson one = PointJson(fit, point);
    one["measured_ms"] = point.seconds * 1000;
    one["error"] = FittedSeconds(fit, point) / point.seconds - 1;
    json["points"].push_back(std::move(one));
  }
  json["predictions"] = OrderedJson::array();
  for (const FitPrediction& prediction : report.predictions) {
    OrderedJson one = PointJson(fit, prediction.point);
    one["predicted"] = true;
    one["speedup"] = prediction.speedup;
    one["efficiency"] = prediction.efficiency;
    json["predictions"].push_back(std::move(one));
  }
  json["assumptions"] = FitAssumptions(report.data);
  return json;
}

}  // namespace lockstep
