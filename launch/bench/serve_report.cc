#include "launch/bench/serve_report.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "launch/bench/statistics.h"

namespace lockstep {

namespace {

// The values of all requests that were answered, by metric.
using Samples = std::map<std::string, std::vector<double>>;

Samples CollectSamples(const std::vector<ServedRequest>& served) {
  Samples samples;
  for (const ServedRequest& one : served) {
    samples["ttft"].push_back(one.ttft);
    samples["e2el"].push_back(one.e2el);
    if (one.tpot.has_value()) samples["tpot"].push_back(*one.tpot);
    samples["itl"].insert(samples["itl"].end(), one.itl.begin(), one.itl.end());
  }
  return samples;
}

// A request is good that meets every limit; one with a single token has a tpot of 0.
bool IsGood(const ServedRequest& one, const std::map<std::string, double>& limits_ms) {
  const std::map<std::string, double> values = {
      {"ttft", one.ttft}, {"tpot", one.tpot.value_or(0)}, {"e2el", one.e2el}};
  return std::all_of(limits_ms.begin(), limits_ms.end(),
                     [&](const auto& limit) { return values.at(limit.first) <= limit.second; });
}

// Most arrivals of tokens within one of the whole seconds from the first request on.
double PeakTokensPerSecond(const LoadResult& load) {
  std::vector<int64_t> seconds(static_cast<size_t>(load.duration) + 2, 0);
  for (const LoadRecord& record : load.records) {
    if (!record.ok()) continue;
    for (const double arrival : record.arrivals) ++seconds[static_cast<size_t>(arrival)];
  }
  return static_cast<double>(*std::max_element(seconds.begin(), seconds.end()));
}

OrderedJson Rate(double count, double seconds) {
  return seconds > 0 ? OrderedJson(count / seconds) : OrderedJson(nullptr);
}

void AddMetrics(const ServeBenchOptions& options, const Samples& samples, OrderedJson* result) {
  for (const std::string& metric : options.metrics) {
    const auto found = samples.find(metric);
    const Statistics statistics(found == samples.end() ? std::vector<double>() : found->second);
    const auto put = [&](const std::string& name, auto of) {
      (*result)[absl::StrCat(name, "_", metric, "_ms")] =
          statistics.empty() ? OrderedJson(nullptr) : OrderedJson(of(statistics));
    };
    put("mean", [](const Statistics& s) { return s.mean(); });
    put("median", [](const Statistics& s) { return s.median(); });
    put("std", [](const Statistics& s) { return s.std(); });
    for (const double p : options.percentiles) {
      put(absl::StrCat("p", PercentileName(p)),
          [p](const Statistics& s) { return s.Percentile(p); });
    }
  }
}

// vLLM's lists: seconds, 0 and nothing for what failed.
void AddDetails(const ServeRun& run, const LoadResult& load,
                const std::vector<std::optional<ServedRequest>>& measured, OrderedJson* result) {
  for (const char* name : {"input_lens", "output_lens", "ttfts", "itls", "generated_texts",
                           "errors", "arrival_times", "send_times"}) {
    (*result)[name] = OrderedJson::array();
  }
  for (size_t i = 0; i < load.records.size(); ++i) {
    const LoadRecord& record = load.records[i];
    const ServedRequest one = measured[i].value_or(ServedRequest());
    std::vector<double> itl_seconds = one.itl;
    for (double& itl : itl_seconds) itl /= 1000;
    const int64_t sent = run.prompt_tokens[i].value_or(0);
    (*result)["input_lens"].push_back(measured[i].has_value() ? one.input_tokens : sent);
    (*result)["output_lens"].push_back(one.output_tokens);
    (*result)["ttfts"].push_back(one.ttft / 1000);
    (*result)["itls"].push_back(itl_seconds);
    (*result)["generated_texts"].push_back(record.text);
    (*result)["errors"].push_back(record.error);
    (*result)["arrival_times"].push_back(run.arrivals[i]);
    (*result)["send_times"].push_back(record.sent ? OrderedJson(*record.sent)
                                                  : OrderedJson(nullptr));
  }
}

OrderedJson SettingsJson(const ServeBenchOptions& options, const ServeRun& run) {
  const char* const backend = options.endpoint == BenchEndpoint::kChat ? "openai-chat" : "openai";
  OrderedJson json;
  json["date"] = run.date;
  json["endpoint_type"] = backend;
  json["backend"] = backend;
  json["label"] = nullptr;
  json["model_id"] = run.model;
  json["tokenizer_id"] = nullptr;
  json["base_url"] = options.server->text();
  json["num_prompts"] = run.arrivals.size();
  json["dataset"] = !options.prompts.empty() ? options.prompts
                    : run.as_ids             ? "random ids"
                                             : "random words";
  json["seed"] = options.seed;
  json["request_rate"] =
      std::isinf(options.request_rate) ? OrderedJson("inf") : OrderedJson(options.request_rate);
  json["burstiness"] = options.burstiness;
  json["max_concurrency"] =
      options.max_concurrency ? OrderedJson(*options.max_concurrency) : OrderedJson(nullptr);
  return json;
}

// How true the load was to its schedule.
void AddSending(const ServeRun& run, const LoadResult& load, OrderedJson* result) {
  std::vector<double> lateness_ms;
  int64_t num_held = 0;
  for (size_t i = 0; i < load.records.size(); ++i) {
    const std::optional<double> sent = load.records[i].sent;
    if (sent) lateness_ms.push_back((*sent - run.arrivals[i]) * 1000);
    num_held += load.records[i].held ? 1 : 0;
  }
  (*result)["send_lateness_ms"] = StatisticsJson(Statistics(std::move(lateness_ms)));
  (*result)["held_by_max_concurrency"] = num_held;
}

std::string Line(const std::string& title, const OrderedJson& value, bool whole) {
  const std::string text = value.is_null() ? "-"
                           : whole         ? absl::StrCat(value.get<int64_t>())
                                           : absl::StrFormat("%.2f", value.get<double>());
  return absl::StrFormat("%-40s %-10s\n", title, text);
}

std::string Centred(const std::string& text, char fill) {
  const size_t space = 50 - std::min<size_t>(50, text.size());
  return absl::StrCat(std::string(space / 2, fill), text, std::string(space - space / 2, fill),
                      "\n");
}

std::string MetricLines(const ServeBenchOptions& options, const std::string& metric,
                        const OrderedJson& result) {
  const std::map<std::string, std::pair<const char*, const char*>> names = {
      {"ttft", {"TTFT", "Time to First Token"}},
      {"tpot", {"TPOT", "Time per Output Token (excl. 1st token)"}},
      {"itl", {"ITL", "Inter-token Latency"}},
      {"e2el", {"E2EL", "End-to-end Latency"}}};
  const std::string name = names.at(metric).first;
  std::string text = Centred(names.at(metric).second, '-');
  const auto line = [&](const std::string& title, const std::string& key) {
    absl::StrAppend(&text, Line(absl::StrCat(title, " ", name, " (ms):"),
                                result[absl::StrCat(key, "_", metric, "_ms")], false));
  };
  line("Mean", "mean");
  line("Median", "median");
  line("Std", "std");
  for (const double p : options.percentiles) {
    line(absl::StrCat("P", PercentileName(p)), absl::StrCat("p", PercentileName(p)));
  }
  return text;
}

}  // namespace

ServedRequest MeasureRequest(const LoadRecord& record, std::optional<int64_t> sent_tokens) {
  ServedRequest one;
  one.input_tokens = record.prompt_tokens.value_or(sent_tokens.value_or(0));
  one.output_tokens =
      record.completion_tokens.value_or(static_cast<int64_t>(record.arrivals.size()));
  one.ttft = (record.arrivals.front() - *record.sent) * 1000;
  one.e2el = (record.last_event - *record.sent) * 1000;
  for (size_t k = 1; k < record.arrivals.size(); ++k) {
    one.itl.push_back((record.arrivals[k] - record.arrivals[k - 1]) * 1000);
  }
  if (one.output_tokens > 1) {
    one.tpot = (one.e2el - one.ttft) / static_cast<double>(one.output_tokens - 1);
  }
  return one;
}

OrderedJson ServeResult(const ServeBenchOptions& options, const ServeRun& run,
                        const LoadResult& load) {
  std::vector<std::optional<ServedRequest>> measured;
  std::vector<ServedRequest> served;
  int64_t input = 0, output = 0, num_good = 0, num_uncounted = 0;
  for (size_t i = 0; i < load.records.size(); ++i) {
    const LoadRecord& record = load.records[i];
    measured.emplace_back();
    if (!record.ok()) continue;
    measured.back() = served.emplace_back(MeasureRequest(record, run.prompt_tokens[i]));
    input += served.back().input_tokens;
    output += served.back().output_tokens;
    num_good += IsGood(served.back(), options.goodput_ms) ? 1 : 0;
    num_uncounted += record.completion_tokens.has_value() ? 0 : 1;
  }
  const double seconds = load.duration;
  OrderedJson result = SettingsJson(options, run);
  result["duration"] = seconds;
  result["completed"] = served.size();
  result["failed"] = load.records.size() - served.size();
  result["total_input_tokens"] = input;
  result["total_output_tokens"] = output;
  result["request_throughput"] = Rate(static_cast<double>(served.size()), seconds);
  result["request_goodput"] = options.goodput_ms.empty()
                                  ? OrderedJson(nullptr)
                                  : Rate(static_cast<double>(num_good), seconds);
  result["output_throughput"] = Rate(static_cast<double>(output), seconds);
  result["total_token_throughput"] = Rate(static_cast<double>(input + output), seconds);
  if (options.save_detailed) AddDetails(run, load, measured, &result);
  result["max_output_tokens_per_s"] = PeakTokensPerSecond(load);
  result["max_concurrent_requests"] = load.max_open;
  AddMetrics(options, CollectSamples(served), &result);
  AddSending(run, load, &result);
  result["requests_without_usage"] = num_uncounted;
  return result;
}

std::string ServeTable(const ServeBenchOptions& options, const OrderedJson& result) {
  std::string text = Centred(" Serving Benchmark Result ", '=');
  const auto line = [&](const char* title, const char* key, bool whole) {
    absl::StrAppend(&text, Line(title, result[key], whole));
  };
  line("Successful requests:", "completed", true);
  line("Failed requests:", "failed", true);
  if (options.max_concurrency) line("Maximum request concurrency:", "max_concurrency", true);
  if (!std::isinf(options.request_rate)) {
    line("Request rate configured (RPS):", "request_rate", false);
  }
  line("Benchmark duration (s):", "duration", false);
  line("Total input tokens:", "total_input_tokens", true);
  line("Total generated tokens:", "total_output_tokens", true);
  line("Request throughput (req/s):", "request_throughput", false);
  if (!options.goodput_ms.empty()) line("Request goodput (req/s):", "request_goodput", false);
  line("Output token throughput (tok/s):", "output_throughput", false);
  line("Peak output token throughput (tok/s):", "max_output_tokens_per_s", false);
  line("Peak concurrent requests:", "max_concurrent_requests", true);
  line("Total Token throughput (tok/s):", "total_token_throughput", false);
  for (const std::string& metric : options.metrics) {
    absl::StrAppend(&text, MetricLines(options, metric, result));
  }
  absl::StrAppend(&text, Centred("Lateness of sending", '-'));
  const OrderedJson& lateness = result["send_lateness_ms"];
  absl::StrAppend(&text, Line("Mean lateness (ms):", lateness["mean"], false));
  absl::StrAppend(&text, Line("P99 lateness (ms):", lateness["p99"], false));
  absl::StrAppend(&text, Line("Maximum lateness (ms):", lateness["max"], false));
  line("Held back by the concurrency limit:", "held_by_max_concurrency", true);
  if (result["requests_without_usage"].get<int64_t>() > 0) {
    line("Answers counted by their events:", "requests_without_usage", true);
  }
  return text + std::string(50, '=') + "\n";
}

}  // namespace lockstep
