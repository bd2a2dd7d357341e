#include <algorithm>
#include <map>

#include "launch/report/html_parts.h"
#include "launch/report/report.h"
#include "launch/report/svg_chart.h"

namespace lockstep {

namespace {

constexpr const char* kTermTitles[kNumFitTerms] = {"memory bandwidth", "rate of arithmetic",
                                                   "host, a step", "latency of an all-reduce",
                                                   "bus bandwidth of an all-reduce"};

// The coefficient as people know it: rates are its inverse.
std::string ValueText(int term, double seconds_per_unit) {
  switch (term) {
    case kFitBytes:
    case kFitSumBytes:
      return absl::StrFormat("%.4g GB/s", 1e-9 / seconds_per_unit);
    case kFitOperations:
      return absl::StrFormat("%.4g GFLOP/s", 1e-9 / seconds_per_unit);
    default:
      return absl::StrFormat("%.4g µs", seconds_per_unit * 1e6);
  }
}

std::string NoteText(const FitParameter& parameter) {
  switch (parameter.state) {
    case FitParameter::State::kNoPoint:
      return "no measured point has any of it";
    case FitParameter::State::kZero:
      return "no time that grows with it is seen: taken as 0 seconds";
    case FitParameter::State::kNotSeparate: {
      std::string names;
      for (const int term : parameter.not_apart_from) {
        absl::StrAppend(&names, names.empty() ? "" : ", ", kTermTitles[term]);
      }
      return "cannot be told apart, with these points, from: " + names + ". Its time is in theirs";
    }
    case FitParameter::State::kFitted:
      break;
  }
  if (!parameter.standard_error) return "fitted; without points to spare its error is not known";
  const double error = *parameter.standard_error / parameter.seconds_per_unit;
  if (error > 0.5) return absl::StrFormat("fitted, but hardly determined: ± %.0f%%", error * 100);
  return absl::StrFormat("fitted, ± %.2g%%", error * 100);
}

std::string ParameterTable(const Report& report) {
  const bool on_cpu = report.data.latency[0].device == "cpu";
  HtmlTable table({"parameter", "value", "how well it is known"});
  for (int term = 0; term < kNumFitTerms; ++term) {
    const FitParameter& parameter = report.fit.parameters[term];
    const bool is_rate = term == kFitBytes || term == kFitOperations;
    table.Row({absl::StrCat(kTermTitles[term], !is_rate ? ""
                                               : on_cpu ? " of a core"
                                                        : " of a rank"),
               parameter.seconds_per_unit > 0 ? ValueText(term, parameter.seconds_per_unit) : "-",
               NoteText(parameter)});
  }
  return table.Html();
}

std::vector<std::string> PointRow(const Report& report, const FitPoint& point) {
  std::vector<std::string> row = {point.phase, absl::StrCat(point.batch_size),
                                  absl::StrCat(point.num_ranks)};
  for (int term = 0; term < kNumFitTerms; ++term) {
    row.push_back(absl::StrFormat("%.3f", TermSeconds(report.fit, point, term) * 1000));
  }
  return row;
}

std::string PointTable(const Report& report) {
  HtmlTable table({"phase", "batch size", "ranks", "bytes ms", "arithmetic ms", "host ms",
                   "all-reduce latency ms", "all-reduce bytes ms", "fit ms", "measured ms",
                   "error"});
  for (const FitPoint& point : report.fit.points) {
    std::vector<std::string> row = PointRow(report, point);
    const double fitted = FittedSeconds(report.fit, point);
    row.push_back(absl::StrFormat("%.3f", fitted * 1000));
    row.push_back(absl::StrFormat("%.3f", point.seconds * 1000));
    row.push_back(absl::StrFormat("%.1f%%", (fitted / point.seconds - 1) * 100));
    table.Row(std::move(row));
  }
  return table.Html();
}

std::string PredictionTable(const Report& report) {
  if (report.predictions.empty()) {
    return HtmlText("No more ranks are predicted: the model cannot be split over twice as many.");
  }
  HtmlTable table({"phase", "batch size", "ranks", "bytes ms", "arithmetic ms", "host ms",
                   "all-reduce latency ms", "all-reduce bytes ms", "predicted ms",
                   "predicted speed-up", "predicted efficiency"});
  for (const FitPrediction& prediction : report.predictions) {
    std::vector<std::string> row = PointRow(report, prediction.point);
    row.push_back(absl::StrFormat("%.3f", prediction.point.seconds * 1000));
    row.push_back(absl::StrFormat("%.3f", prediction.speedup));
    row.push_back(absl::StrFormat("%.1f%%", prediction.efficiency * 100));
    table.Row(std::move(row));
  }
  return table.Html();
}

// Measured points, and through them, and beyond, the fit as a dashed line of the same colour.
std::string FitChart(const Report& report, const std::string& phase) {
  LineChart chart = {.title = absl::StrFormat("%s: measured, and the fit (dashed) beyond it",
                                              phase == "prefill" ? "Prefill" : "Decode step"),
                     .x_label = "ranks N",
                     .y_label = "ms",
                     .log_x = true,
                     .log_y = true};
  std::map<int64_t, std::pair<ChartSeries, ChartSeries>> by_batch;
  std::vector<int> ranks = MeasuredRanks(report);
  for (const FitPoint& point : report.fit.points) {
    if (point.phase != phase) continue;
    auto& [measured, fitted] = by_batch[point.batch_size];
    measured.points.emplace_back(point.num_ranks, point.seconds * 1000);
    fitted.points.emplace_back(point.num_ranks, FittedSeconds(report.fit, point) * 1000);
  }
  for (const FitPrediction& prediction : report.predictions) {
    const FitPoint& point = prediction.point;
    if (point.phase != phase) continue;
    by_batch[point.batch_size].second.points.emplace_back(point.num_ranks, point.seconds * 1000);
    ranks.push_back(point.num_ranks);
  }
  std::sort(ranks.begin(), ranks.end());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  for (const int n : ranks) chart.x_ticks.push_back(n);
  for (auto& [batch, both] : by_batch) {
    auto& [measured, fitted] = both;
    measured.name = absl::StrFormat("batch %d", batch);
    fitted.name = absl::StrFormat("batch %d, fit", batch);
    measured.color = fitted.color = static_cast<int>(chart.series.size() / 2);
    fitted.dashed = true;
    chart.series.push_back(std::move(measured));
    chart.series.push_back(std::move(fitted));
  }
  return LineChartHtml(chart);
}

}  // namespace

std::string FitSection(const Report& report) {
  const char* const title = "A model that explains, and predictions";
  if (!report.fit.not_made.empty()) return HtmlSection(title, HtmlText(report.fit.not_made));
  std::string html = HtmlText(
      "t = bytes of weights and KV / bandwidth + operations / rate + steps * host + all-reduces * "
      "(latency + bytes * 2 (N - 1) / N / bus bandwidth), of the fullest rank; no coefficient "
      "below 0; least squares of the relative errors.");
  const int64_t spare = std::ssize(report.fit.points) - report.fit.num_fitted;
  absl::StrAppend(&html,
                  HtmlText(absl::StrFormat("%d measured points, %d free parameters.",
                                           report.fit.points.size(), report.fit.num_fitted)));
  if (spare <= 0) {
    absl::StrAppend(&html, HtmlWarning("As many parameters as points: the fit passes through all "
                                       "of them, and its errors say nothing."));
  }
  absl::StrAppend(&html, HtmlCharts(FitChart(report, "prefill") + FitChart(report, "decode")),
                  ParameterTable(report), "<h3>Measured points</h3>\n", PointTable(report),
                  "<h3>Predicted, not measured</h3>\n", PredictionTable(report));
  if (!report.predictions.empty()) {
    absl::StrAppend(&html, HtmlText("Assumed:"), "<ul>\n");
    for (const std::string& assumption : FitAssumptions(report.data)) {
      absl::StrAppend(&html, "<li>", EscapeHtml(assumption), "</li>\n");
    }
    absl::StrAppend(&html, "</ul>\n");
  }
  return HtmlSection(title, html);
}

}  // namespace lockstep
