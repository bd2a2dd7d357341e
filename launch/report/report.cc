#include "launch/report/report.h"

#include <algorithm>
#include <set>
#include <utility>

namespace lockstep {

namespace {

OrderedJson OrNull(const auto& value) { return value ? OrderedJson(*value) : OrderedJson(nullptr); }

OrderedJson ScalingJson(const ScalingRow& row) {
  OrderedJson json;
  json["phase"] = row.phase;
  json["batch_size"] = row.batch_size;
  json["num_ranks"] = row.num_ranks;
  json["base_ranks"] = row.base_ranks;
  json["ms"] = row.ms;
  json["spread"] = row.spread;
  json["tokens_per_second"] = row.tokens_per_second;
  json["speedup"] = row.speedup;
  json["efficiency"] = row.efficiency;
  return json;
}

OrderedJson ThroughputJson(const ThroughputRow& row) {
  OrderedJson json;
  json["num_ranks"] = row.result.num_ranks;
  json["base_ranks"] = row.base_ranks;
  json["num_requests"] = row.result.num_requests;
  json["elapsed_seconds"] = row.result.elapsed_seconds;
  json["requests_per_second"] = row.requests_per_second;
  json["input_tokens_per_second"] = row.input_tokens_per_second;
  json["output_tokens_per_second"] = row.output_tokens_per_second;
  json["tokens_per_second_per_rank"] = row.tokens_per_second_per_rank;
  json["speedup"] = row.speedup;
  json["efficiency"] = row.efficiency;
  return json;
}

OrderedJson ProfileJson(const ProfileResult& profile) {
  OrderedJson json;
  json["phase"] = profile.phase;
  json["batch_size"] = profile.batch_size;
  json["num_ranks"] = profile.num_ranks;
  json["steps"] = profile.steps;
  json["slowest_rank"] = SlowestRank(profile).rank;
  json["straggler"] = OrNull(profile.straggler);
  json["straggler_work_ms"] = profile.straggler_work_ms;
  json["mean_work_ms"] = profile.mean_work_ms;
  json["ranks"] = OrderedJson::array();
  for (const ProfileResult::Rank& rank : profile.ranks) {
    OrderedJson one;
    one["rank"] = rank.rank;
    one["host"] = rank.host;
    one["step_ms"] = rank.step_ms;
    one["parts_ms"] = OrderedJson::object();
    for (const auto& [name, ms] : rank.parts_ms) one["parts_ms"][name] = ms;
    json["ranks"].push_back(std::move(one));
  }
  return json;
}

OrderedJson CollectiveJson(const CollectiveResult& row) {
  OrderedJson json;
  json["num_ranks"] = row.num_ranks;
  json["algorithm"] = row.algorithm;
  json["bytes"] = row.bytes;
  json["us"] = row.us;
  json["algbw_bytes_per_second"] = row.algbw;
  json["busbw_bytes_per_second"] = row.busbw;
  return json;
}

OrderedJson SamenessJson(const Sameness& same) {
  OrderedJson json;
  json["num_ranks"] = same.num_ranks;
  json["base_ranks"] = same.base_ranks;
  json["num_prompts"] = same.num_prompts;
  json["num_same"] = same.num_same;
  json["compared_tokens"] = same.compared_tokens;
  json["max_logprob_difference"] = same.max_logprob_difference;
  json["partings"] = OrderedJson::array();
  for (const Parting& parting : same.partings) {
    OrderedJson one;
    one["prompt"] = parting.prompt;
    one["position"] = parting.position;
    one["base_id"] = OrNull(parting.base_id);
    one["id"] = OrNull(parting.id);
    one["margin"] = OrNull(parting.margin);
    json["partings"].push_back(std::move(one));
  }
  return json;
}

template <typename Row>
OrderedJson ArrayJson(const std::vector<Row>& rows, OrderedJson (*to_json)(const Row&)) {
  OrderedJson json = OrderedJson::array();
  for (const Row& row : rows) json.push_back(to_json(row));
  return json;
}

}  // namespace

absl::StatusOr<Report> MakeReport(ReportData data) {
  Report report;
  report.scaling = ScalingRows(data.latency);
  LOCKSTEP_ASSIGN_OR_RETURN(report.emulated, EmulatedRows(data.emulated, report.scaling));
  report.throughput = ThroughputRows(data.throughput);
  LOCKSTEP_ASSIGN_OR_RETURN(report.sameness, CompareAnswers(data.generated));
  report.fit = FitResults(data, report.scaling);
  report.predictions = PredictMore(data, report.fit, report.scaling);
  report.data = std::move(data);
  return report;
}

OrderedJson ReportJson(const Report& report) {
  const LatencyResult& first = report.data.latency[0];
  OrderedJson json;
  json["kind"] = "scaling";
  json["device"] = first.device;
  json["dtype"] = first.dtype;
  json["weights"] = first.weights;
  json["input_len"] = first.input_len;
  json["output_len"] = first.output_len;
  json["baseline_ranks"] = MeasuredRanks(report)[0];
  json["measured_ranks"] = MeasuredRanks(report);
  json["missing_ranks"] = MissingRanks(report);
  json["latency"] = ArrayJson(report.scaling, ScalingJson);
  json["emulated"] = ArrayJson(report.emulated, ScalingJson);
  json["throughput"] = ArrayJson(report.throughput, ThroughputJson);
  json["profile"] = ArrayJson(report.data.profiles, ProfileJson);
  json["collectives"] = ArrayJson(report.data.collectives, CollectiveJson);
  json["sameness"] = ArrayJson(report.sameness, SamenessJson);
  json["fit"] = FitJson(report);
  json["files"] = report.data.files;
  json["run"] = report.data.run;
  return json;
}

std::vector<int> MeasuredRanks(const Report& report) {
  std::set<int> ranks;
  for (const LatencyResult& one : report.data.latency) ranks.insert(one.num_ranks);
  return {ranks.begin(), ranks.end()};
}

std::vector<int> MissingRanks(const Report& report) {
  const OrderedJson& run = report.data.run;
  if (!run.is_object() || !run.contains("ranks") || !run["ranks"].is_array()) return {};
  const std::vector<int> measured = MeasuredRanks(report);
  std::vector<int> missing;
  for (const OrderedJson& ranks : run["ranks"]) {
    if (!ranks.is_number_integer()) continue;
    const int n = ranks.get<int>();
    if (!std::binary_search(measured.begin(), measured.end(), n)) missing.push_back(n);
  }
  return missing;
}

const ProfileResult::Rank& SlowestRank(const ProfileResult& profile) {
  return *std::max_element(profile.ranks.begin(), profile.ranks.end(),
                           [](const auto& a, const auto& b) { return a.step_ms < b.step_ms; });
}

}  // namespace lockstep
