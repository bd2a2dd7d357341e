#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "launch/report/html_parts.h"
#include "launch/report/report.h"
#include "launch/report/svg_chart.h"

namespace lockstep {

namespace {

std::string Plural(int64_t n, const char* one) {
  return absl::StrFormat("%d %s%s", n, one, n == 1 ? "" : "s");
}

// Charts of one phase: a line a batch size. `value` is a member of ScalingRow.
LineChart OverRanks(const Report& report, const std::string& phase, double ScalingRow::*value) {
  LineChart chart;
  chart.x_label = "ranks N";
  chart.log_x = true;
  for (const int n : MeasuredRanks(report)) chart.x_ticks.push_back(n);
  std::map<int64_t, ChartSeries> by_batch;
  for (const ScalingRow& row : report.scaling) {
    if (row.phase != phase) continue;
    ChartSeries& series = by_batch[row.batch_size];
    series.name = "batch " + absl::StrCat(row.batch_size);
    series.points.emplace_back(row.num_ranks, row.*value);
  }
  std::map<int64_t, ChartSeries> emulated;
  for (const ScalingRow& row : report.emulated) {
    if (row.phase != phase) continue;
    chart.x_ticks.push_back(row.num_ranks);
    emulated[row.batch_size].points.emplace_back(row.num_ranks, row.*value);
  }
  std::sort(chart.x_ticks.begin(), chart.x_ticks.end());
  chart.x_ticks.erase(std::unique(chart.x_ticks.begin(), chart.x_ticks.end()), chart.x_ticks.end());
  int color = 0;
  for (auto& [batch, series] : by_batch) {
    series.color = color++;
    const std::pair<double, double> base = series.points[0];
    if (const auto found = emulated.find(batch); found != emulated.end()) {
      ChartSeries& bound = found->second;
      bound.name = series.name + ", compute alone (emulated)";
      bound.points.insert(bound.points.begin(), base);
      bound.dashed = true;
      bound.color = series.color;
      chart.series.push_back(std::move(bound));
    }
    chart.series.push_back(std::move(series));
  }
  return chart;
}

std::string ScalingCharts(const Report& report) {
  std::string html;
  for (const char* phase : {"prefill", "decode"}) {
    LineChart speedup = OverRanks(report, phase, &ScalingRow::speedup);
    if (speedup.series.empty()) continue;
    const std::vector<double> ranks = speedup.x_ticks;
    speedup.title = absl::StrFormat("Speed-up of %s", phase);
    speedup.y_label = absl::StrFormat("t(%d) / t(N)", MeasuredRanks(report)[0]);
    ChartSeries ideal = {.name = "ideal", .points = {}, .dashed = true, .color = -1};
    // Many points: on a logarithmic axis the ideal is a curve.
    const double least = ranks.front(), most = ranks.back();
    for (int i = 0; i <= 32; ++i) {
      const double n = least * std::pow(most / least, i / 32.0);
      ideal.points.emplace_back(n, n / least);
    }
    speedup.series.push_back(std::move(ideal));
    LineChart efficiency = OverRanks(report, phase, &ScalingRow::efficiency);
    efficiency.title = absl::StrFormat("Efficiency of %s", phase);
    efficiency.y_label = "speed-up / (N / base)";
    ChartSeries one = {.name = "ideal", .points = {}, .dashed = true, .color = -1};
    for (const double n : ranks) one.points.emplace_back(n, 1);
    efficiency.series.push_back(std::move(one));
    absl::StrAppend(&html, LineChartHtml(speedup), LineChartHtml(efficiency));
  }
  return html;
}

std::string ScalingTable(const std::vector<ScalingRow>& rows) {
  HtmlTable table({"phase", "batch size", "ranks", "ms (median)", "± half range", "tokens/s",
                   "speed-up", "efficiency"});
  for (const ScalingRow& row : rows) {
    table.Row({row.phase, absl::StrCat(row.batch_size), absl::StrCat(row.num_ranks),
               absl::StrFormat("%.3f", row.ms), absl::StrFormat("%.1f%%", row.spread * 100),
               absl::StrFormat("%.1f", row.tokens_per_second), absl::StrFormat("%.3f", row.speedup),
               absl::StrFormat("%.1f%%", row.efficiency * 100)});
  }
  return table.Html();
}

std::string ScalingSection(const Report& report) {
  std::string emulated;
  if (!report.emulated.empty()) {
    emulated = HtmlText(
                   "Emulated: what rank 0, the fullest, of so many computes, measured on one rank "
                   "without all-reduces. A bound but for noise, not a measured "
                   "speed-up.") +
               ScalingTable(report.emulated);
  }
  const LatencyResult& first = report.data.latency[0];
  return HtmlSection(
      "Speed-up and efficiency",
      HtmlText(absl::StrFormat(
          "Prefill: a whole batch of prompts of %s, to the first token of all. Decode: one step, "
          "a token for each request; answers of %s. Baseline of each line: the fewest ranks "
          "of which there is a result. The half range is that of all repeats or steps.",
          Plural(first.input_len, "token"), Plural(first.output_len, "token"))) +
          HtmlCharts(ScalingCharts(report)) + ScalingTable(report.scaling) + emulated);
}

std::string LatencyAgainstThroughput(const Report& report) {
  LineChart chart = {.title = "Decode: time of a step against tokens/s, by batch size",
                     .x_label = "tokens/s",
                     .y_label = "ms a step",
                     .log_x = true,
                     .log_y = true};
  std::map<int, ChartSeries> by_ranks;
  for (const ScalingRow& row : report.scaling) {
    if (row.phase != "decode") continue;
    ChartSeries& series = by_ranks[row.num_ranks];
    series.name = Plural(row.num_ranks, "rank");
    series.points.emplace_back(row.tokens_per_second, row.ms);
  }
  for (auto& [ranks, series] : by_ranks) {
    series.color = static_cast<int>(chart.series.size());
    chart.series.push_back(std::move(series));
  }
  HtmlTable table({"ranks", "requests", "seconds", "requests/s", "input tokens/s",
                   "output tokens/s", "tokens/s a rank", "speed-up", "efficiency"});
  for (const ThroughputRow& row : report.throughput) {
    table.Row({absl::StrCat(row.result.num_ranks), absl::StrCat(row.result.num_requests),
               absl::StrFormat("%.3f", row.result.elapsed_seconds),
               absl::StrFormat("%.2f", row.requests_per_second),
               absl::StrFormat("%.1f", row.input_tokens_per_second),
               absl::StrFormat("%.1f", row.output_tokens_per_second),
               absl::StrFormat("%.1f", row.tokens_per_second_per_rank),
               absl::StrFormat("%.3f", row.speedup),
               absl::StrFormat("%.1f%%", row.efficiency * 100)});
  }
  return HtmlSection(
      "Latency against throughput",
      HtmlCharts(LineChartHtml(chart)) +
          (report.throughput.empty()
               ? HtmlText("No result of bench throughput is there.")
               : HtmlText("All prompts at once, random lengths or a file's:") + table.Html()));
}

// Bars by N of one phase and batch size; parts named alike share a colour.
std::string BreakdownChart(const std::vector<const ProfileResult*>& profiles,
                           const std::vector<std::string>& parts) {
  StackedBarChart chart;
  chart.title = absl::StrFormat("Step of %s, batch %d: slowest rank", profiles[0]->phase,
                                profiles[0]->batch_size);
  chart.y_label = "ms a step";
  chart.parts = parts;
  for (const ProfileResult* const profile : profiles) {
    StackedBar bar = {.label = absl::StrCat(profile->num_ranks), .values = {}};
    for (const std::string& part : parts) {
      double sum = 0;
      for (const auto& [name, ms] : SlowestRank(*profile).parts_ms) {
        if (name == part) sum += std::max(ms, 0.0);
      }
      bar.values.push_back(sum);
    }
    chart.bars.push_back(std::move(bar));
  }
  return StackedBarChartHtml(chart);
}

// In the order of first appearance.
std::vector<std::string> PartNames(const std::vector<ProfileResult>& profiles) {
  std::vector<std::string> names;
  for (const ProfileResult& profile : profiles) {
    for (const ProfileResult::Rank& rank : profile.ranks) {
      for (const auto& [name, ms] : rank.parts_ms) {
        if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
      }
    }
  }
  return names;
}

std::string BreakdownSection(const Report& report) {
  const std::vector<ProfileResult>& profiles = report.data.profiles;
  if (profiles.empty()) {
    return HtmlSection("Where a step's time goes",
                       HtmlText("Not there: no result of bench latency --profile."));
  }
  const std::vector<std::string> parts = PartNames(profiles);
  std::vector<std::string> heads = {"phase", "batch size", "ranks", "rank", "host", "ms a step"};
  heads.insert(heads.end(), parts.begin(), parts.end());
  HtmlTable table(heads);
  HtmlTable stragglers(
      {"phase", "batch size", "ranks", "straggler", "its work ms", "mean work ms"});
  std::map<std::pair<std::string, int64_t>, std::vector<const ProfileResult*>> groups;
  for (const ProfileResult& profile : profiles) {
    groups[{profile.phase, profile.batch_size}].push_back(&profile);
    if (profile.straggler && profile.num_ranks > 1) {
      stragglers.Row({profile.phase, absl::StrCat(profile.batch_size),
                      absl::StrCat(profile.num_ranks), absl::StrCat("rank ", *profile.straggler),
                      absl::StrFormat("%.3f", profile.straggler_work_ms),
                      absl::StrFormat("%.3f", profile.mean_work_ms)});
    }
    for (const ProfileResult::Rank& rank : profile.ranks) {
      std::vector<std::string> row = {profile.phase,
                                      absl::StrCat(profile.batch_size),
                                      absl::StrCat(profile.num_ranks),
                                      absl::StrCat(rank.rank),
                                      rank.host,
                                      absl::StrFormat("%.3f", rank.step_ms)};
      for (const std::string& part : parts) {
        const auto found = std::find_if(rank.parts_ms.begin(), rank.parts_ms.end(),
                                        [&part](const auto& one) { return one.first == part; });
        row.push_back(found == rank.parts_ms.end() ? "-" : absl::StrFormat("%.3f", found->second));
      }
      table.Row(row);
    }
  }
  std::string charts;
  for (const char* phase : {"prefill", "decode"}) {
    for (const auto& [key, group] : groups) {
      if (key.first == phase) absl::StrAppend(&charts, BreakdownChart(group, parts));
    }
  }
  return HtmlSection(
      "Where a step's time goes",
      HtmlText("Mean of a step, in milliseconds. The straggler is the rank whose own work takes "
               "longest: the others wait for it in collectives.") +
          HtmlCharts(charts) + table.Html() + stragglers.Html());
}

std::string CollectivesSection(const Report& report) {
  const std::vector<CollectiveResult>& rows = report.data.collectives;
  if (rows.empty()) {
    return HtmlSection("All-reduce", HtmlText("Not there: no result of bench collectives."));
  }
  LineChart time = {.title = "Time of an all-reduce",
                    .x_label = "bytes",
                    .y_label = "µs",
                    .log_x = true,
                    .log_y = true};
  LineChart bandwidth = {.title = "Bus bandwidth of an all-reduce",
                         .x_label = "bytes",
                         .y_label = "GB/s",
                         .log_x = true,
                         .log_y = true};
  HtmlTable table({"ranks", "algorithm", "bytes", "µs (median)", "algorithm GB/s", "bus GB/s"});
  std::vector<std::string> names;
  for (const CollectiveResult& row : rows) {
    const std::string name =
        absl::StrFormat("%s, %s", row.algorithm, Plural(row.num_ranks, "rank"));
    const auto found = std::find(names.begin(), names.end(), name);
    const auto at = static_cast<size_t>(found - names.begin());
    if (found == names.end()) {
      names.push_back(name);
      for (LineChart* chart : {&time, &bandwidth}) {
        chart->series.push_back({.name = name, .points = {}, .color = static_cast<int>(at)});
      }
    }
    const double bytes = static_cast<double>(row.bytes);
    if (row.us > 0) time.series[at].points.emplace_back(bytes, row.us);
    if (row.busbw > 0) bandwidth.series[at].points.emplace_back(bytes, row.busbw / 1e9);
    table.Row({absl::StrCat(row.num_ranks), row.algorithm, absl::StrCat(row.bytes),
               absl::StrFormat("%.2f", row.us), absl::StrFormat("%.3f", row.algbw / 1e9),
               absl::StrFormat("%.3f", row.busbw / 1e9)});
  }
  return HtmlSection("All-reduce",
                     HtmlText("Bus bandwidth = 2 (N - 1) / N * bytes / time: what each rank sends "
                              "at least; GB are 10^9 bytes.") +
                         HtmlCharts(LineChartHtml(time) + LineChartHtml(bandwidth)) + table.Html());
}

std::string PartingText(const Sameness& same) {
  if (same.partings.empty()) return "-";
  const Parting& first =
      *std::min_element(same.partings.begin(), same.partings.end(),
                        [](const auto& a, const auto& b) { return a.position < b.position; });
  const auto id = [](std::optional<int32_t> one) {
    return one ? absl::StrCat(*one) : std::string("the end");
  };
  return absl::StrFormat("prompt %d, token %d: %s here, %s there; margin %s", first.prompt,
                         first.position, id(first.id), id(first.base_id),
                         first.margin ? absl::StrFormat("%.3g", *first.margin) : "unknown");
}

std::string SamenessSection(const Report& report) {
  if (report.sameness.empty()) {
    return HtmlSection("Same answers", HtmlText("Not compared: answers of one N at most."));
  }
  HtmlTable table({"ranks", "against", "same answers", "tokens compared",
                   "largest difference of a log-probability", "first id that parts"});
  for (const Sameness& same : report.sameness) {
    table.Row({absl::StrCat(same.num_ranks), absl::StrCat(same.base_ranks),
               absl::StrFormat("%d of %d", same.num_same, same.num_prompts),
               absl::StrCat(same.compared_tokens),
               absl::StrFormat("%.3g", same.max_logprob_difference), PartingText(same)});
  }
  return HtmlSection(
      "Same answers",
      HtmlText("Greedy answers to the same prompts. Log-probabilities (natural logarithm) are "
               "compared as long as all ids agree. The margin is by how much the baseline's best "
               "token is ahead of its second best where an answer parts: where it is as small as "
               "the differences, rounding decides.") +
          table.Html());
}

std::string HeadText(const Report& report) {
  const LatencyResult& first = report.data.latency[0];
  const OrderedJson& run = report.data.run;
  std::string ranks;
  for (const int n : MeasuredRanks(report)) {
    absl::StrAppend(&ranks, ranks.empty() ? "" : ", ", n);
  }
  std::string html = HtmlText(absl::StrFormat(
      "%s, %s, weights: %s; %d + %d tokens a request; measured on N = %s ranks%s.", first.device,
      first.dtype, first.weights, first.input_len, first.output_len, ranks,
      run.is_object() && run.contains("date") && run["date"].is_string()
          ? ", " + run["date"].get<std::string>()
          : std::string()));
  std::string missing;
  for (const int n : MissingRanks(report)) {
    absl::StrAppend(&missing, missing.empty() ? "" : ", ", n);
  }
  if (!missing.empty()) {
    absl::StrAppend(&html, HtmlWarning("No latency result of N = " + missing + ": not measured."));
  }
  const int64_t cores = CoresOfRun(run);
  for (const LatencyResult& one : report.data.latency) {
    if (one.device != "cpu" || cores == 0 || one.num_ranks <= cores) continue;
    absl::StrAppend(&html, HtmlWarning(absl::StrFormat(
                               "More ranks than the %d cores of the machine: they take turns, and "
                               "what is measured there is no speed-up of more hardware.",
                               cores)));
    break;
  }
  return html;
}

}  // namespace

std::string ReportHtml(const Report& report) {
  const OrderedJson& run = report.data.run;
  const std::string model = run.is_object() && run.contains("model") && run["model"].is_string()
                                ? run["model"].get<std::string>()
                                : "a model";
  const std::string title = "Scaling of " + model;
  return HtmlPage(title, HeadText(report) + ScalingSection(report) + BreakdownSection(report) +
                             CollectivesSection(report) + LatencyAgainstThroughput(report) +
                             FitSection(report) + SamenessSection(report) +
                             RunSection(run, report.data.files));
}

}  // namespace lockstep
