#include "launch/report/report_data.h"

#include <algorithm>
#include <filesystem>
#include <tuple>
#include <utility>

#include "launch/report/result_fields.h"
#include "runtime/core/file.h"

namespace lockstep {

namespace {

constexpr int64_t kMaxRanks = 65536;

absl::Status CheckName(const std::string& file, const std::string& expected) {
  if (file == expected) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("%s: its contents are those of a %s", file, expected));
}

// Half of the way from least to most, over the median.
double Spread(ResultFields& fields, const std::string& name) {
  const double median = fields.Number(name + "/median");
  const double width = fields.Number(name + "/max") - fields.Number(name + "/min");
  return median > 0 ? width / 2 / median : 0;
}

absl::StatusOr<LatencyResult> ParseLatency(const OrderedJson& json, const std::string& where,
                                           bool emulated) {
  ResultFields fields(json, where);
  if (fields.Text("kind") != "latency") {
    return absl::InvalidArgumentError(where + ": no result of `lockstep bench latency --json`");
  }
  const auto emulation = json.find("emulated");
  const bool is_emulated = emulation != json.end() && !emulation->is_null();
  if (is_emulated != emulated) {
    return absl::InvalidArgumentError(
        where + (emulated ? ": is of no emulated rank"
                          : ": is of an emulated rank, whose times leave out what goes between "
                            "ranks"));
  }
  LatencyResult result;
  result.num_ranks =
      static_cast<int>(fields.Integer(emulated ? "emulated/tp_size" : "num_ranks", 1, kMaxRanks));
  result.batch_size = fields.Integer("batch_size", 1);
  result.input_len = fields.Integer("input_len", 1);
  result.output_len = fields.Integer("output_len", 1);
  result.repeats = fields.Integer("repeats", 1);
  result.num_threads = static_cast<int>(fields.Integer("num_threads", 0, 1 << 20));
  result.device = fields.Text("device");
  result.dtype = fields.Text("dtype");
  result.weights = fields.Text("weights");
  result.prefill_ms = fields.Number("prefill_ms/median");
  result.prefill_spread = Spread(fields, "prefill_ms");
  result.ttft_ms = fields.Number("ttft_ms/median");
  result.decode_step_ms = fields.NumberOrNull("step_ms/median");
  result.tpot_ms = fields.NumberOrNull("tpot_ms/median");
  if (result.decode_step_ms) result.decode_spread = Spread(fields, "step_ms");
  LOCKSTEP_RETURN_IF_ERROR(fields.status());
  if (result.prefill_ms <= 0 || result.decode_step_ms.value_or(1) <= 0) {
    return absl::InvalidArgumentError(where + ": a time of 0 ms cannot be");
  }
  return result;
}

absl::StatusOr<ThroughputResult> ParseThroughput(const OrderedJson& json,
                                                 const std::string& where) {
  ResultFields fields(json, where);
  ThroughputResult result;
  result.num_ranks = static_cast<int>(fields.Integer("num_ranks", 1, kMaxRanks));
  result.num_requests = fields.Integer("num_requests", 1);
  result.elapsed_seconds = fields.Number("elapsed_time");
  result.input_tokens = fields.Integer("total_input_tokens", 0);
  result.output_tokens = fields.Integer("total_output_tokens", 0);
  LOCKSTEP_RETURN_IF_ERROR(fields.status());
  if (result.elapsed_seconds > 0) return result;
  return absl::InvalidArgumentError(where + ": \"elapsed_time\" must be above 0");
}

absl::Status ParsePhase(const OrderedJson& json, const std::string& where, ProfileResult result,
                        std::vector<ProfileResult>* out) {
  if (json.is_null()) return absl::OkStatus();  // no step of this phase
  ResultFields fields(json, where);
  result.steps = fields.Integer("steps", 0);
  for (const OrderedJson& rank : fields.Array("ranks")) {
    ResultFields of_rank(rank, where);
    ProfileResult::Rank one;
    one.rank = static_cast<int>(of_rank.Integer("rank", 0, kMaxRanks));
    one.host = of_rank.Text("host");
    one.step_ms = of_rank.Number("step_ms");
    LOCKSTEP_RETURN_IF_ERROR(of_rank.status());
    const auto parts = rank.find("parts_ms");
    if (parts == rank.end() || !parts->is_object()) {
      return absl::InvalidArgumentError(where + ": \"parts_ms\" must be there and be an object");
    }
    for (const auto& [name, value] : parts->items()) {
      if (!value.is_number()) {
        return absl::InvalidArgumentError(
            absl::StrFormat("%s: \"parts_ms/%s\" must be a number", where, name));
      }
      one.parts_ms.emplace_back(name, value.get<double>());
    }
    result.ranks.push_back(std::move(one));
  }
  if (const auto straggler = json.find("straggler");
      straggler != json.end() && straggler->is_object()) {
    result.straggler = static_cast<int>(fields.Integer("straggler/rank", 0, kMaxRanks));
    result.straggler_work_ms = fields.Number("straggler/work_ms");
    result.mean_work_ms = fields.Number("straggler/mean_work_ms");
  }
  LOCKSTEP_RETURN_IF_ERROR(fields.status());
  if (!result.ranks.empty()) out->push_back(std::move(result));
  return absl::OkStatus();
}

absl::Status ParseProfile(const OrderedJson& json, const std::string& where,
                          std::vector<ProfileResult>* out) {
  ResultFields fields(json, where);
  ProfileResult result;
  result.num_ranks = static_cast<int>(fields.Integer("num_ranks", 1, kMaxRanks));
  result.batch_size = fields.Integer("batch_size", 1);
  LOCKSTEP_RETURN_IF_ERROR(fields.status());
  const auto profile = json.find("profile");
  if (profile == json.end() || !profile->is_object()) {
    return absl::InvalidArgumentError(where + ": \"profile\" must be there and be an object");
  }
  for (const char* phase : {"prefill", "decode"}) {
    const auto found = profile->find(phase);
    if (found == profile->end()) continue;
    result.phase = phase;
    LOCKSTEP_RETURN_IF_ERROR(
        ParsePhase(*found, absl::StrFormat("%s: profile/%s", where, phase), result, out));
  }
  return absl::OkStatus();
}

absl::Status ParseCollectives(const OrderedJson& json, const std::string& where,
                              std::vector<CollectiveResult>* out) {
  ResultFields fields(json, where);
  const int num_ranks = static_cast<int>(fields.Integer("num_ranks", 1, kMaxRanks));
  for (const OrderedJson& row : fields.Array("rows")) {
    ResultFields of_row(row, where + ": rows");
    CollectiveResult result;
    result.num_ranks = num_ranks;
    result.algorithm = of_row.Text("algorithm");
    result.bytes = of_row.Integer("bytes", 1);
    result.us = of_row.Number("us/median");
    result.algbw = of_row.Number("algbw");
    result.busbw = of_row.Number("busbw");
    LOCKSTEP_RETURN_IF_ERROR(of_row.status());
    out->push_back(std::move(result));
  }
  return fields.status();
}

absl::StatusOr<GeneratedToken> ParseToken(const OrderedJson& json, const std::string& where) {
  constexpr int64_t kMaxId = INT32_MAX;
  ResultFields fields(json, where);
  GeneratedToken token;
  token.id = static_cast<int32_t>(fields.Integer("token_id", 0, kMaxId));
  if (json.contains("logprob") && json["logprob"].is_number()) token.logprob = json["logprob"];
  for (const OrderedJson& candidate : fields.Array("top")) {
    ResultFields of_candidate(candidate, where);
    const auto id = static_cast<int32_t>(of_candidate.Integer("token_id", 0, kMaxId));
    LOCKSTEP_RETURN_IF_ERROR(of_candidate.status());
    // null stands for minus infinity, which is no candidate for anything.
    if (candidate.contains("logprob") && candidate["logprob"].is_number()) {
      token.top.emplace_back(id, candidate["logprob"].get<double>());
    }
  }
  LOCKSTEP_RETURN_IF_ERROR(fields.status());
  return token;
}

absl::StatusOr<GeneratedAnswers> ParseAnswers(const std::string& text, const std::string& where,
                                              int num_ranks) {
  GeneratedAnswers result;
  result.num_ranks = num_ranks;
  size_t begin = 0;
  while (begin < text.size()) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    const std::string line = absl::StrFormat("%s, line %d", where, result.answers.size() + 1);
    LOCKSTEP_ASSIGN_OR_RETURN(const OrderedJson json,
                              ParseOrderedJson(text.substr(begin, end - begin), line));
    begin = end + 1;
    ResultFields fields(json, line);
    // The lines come in the order of the prompts; a missing one would compare wrong pairs.
    fields.Integer("prompt_index", std::ssize(result.answers), std::ssize(result.answers));
    std::vector<GeneratedToken>& answer = result.answers.emplace_back();
    for (const OrderedJson& one : fields.Array("logprobs")) {
      LOCKSTEP_ASSIGN_OR_RETURN(GeneratedToken token, ParseToken(one, line));
      answer.push_back(std::move(token));
    }
    LOCKSTEP_RETURN_IF_ERROR(fields.status());
  }
  return result;
}

absl::Status ParsePlan(const OrderedJson& json, const std::string& where, ReportData* data) {
  ResultFields fields(json, where);
  constexpr int64_t kMax = int64_t{1} << 31;
  ModelConfig shape;
  shape.model_type = fields.Text("model_type");
  shape.hidden_size = fields.Integer("hidden_size", 1, kMax);
  shape.intermediate_size = fields.Integer("intermediate_size", 1, kMax);
  shape.num_layers = fields.Integer("num_layers", 1, 1 << 20);
  shape.num_query_heads = fields.Integer("num_query_heads", 1, 1 << 20);
  shape.num_kv_heads = fields.Integer("num_kv_heads", 1, 1 << 20);
  shape.head_dim = fields.Integer("head_dim", 1, kMax);
  shape.vocab_size = fields.Integer("vocab_size", 1, kMax);
  for (const OrderedJson& window : fields.Array("layer_windows")) {
    if (!window.is_number_integer()) {
      return absl::InvalidArgumentError(where + ": \"layer_windows\" must be whole numbers");
    }
    shape.layer_windows.push_back(window.get<int64_t>());
  }
  data->kv_dtype = fields.Text("kv_cache_dtype");
  LOCKSTEP_RETURN_IF_ERROR(fields.status());
  if (!shape.layer_windows.empty() && std::ssize(shape.layer_windows) != shape.num_layers) {
    return absl::InvalidArgumentError(
        where + ": \"layer_windows\" must be empty or have one window a layer");
  }
  data->shape = std::move(shape);
  return absl::OkStatus();
}

// One file of the folder by its name; others than those in the header are none of the report's.
class FolderReader {
 public:
  explicit FolderReader(std::string folder) : folder_(std::move(folder)) {}

  absl::Status Read(const std::string& name);
  ReportData data;

 private:
  absl::Status ReadResult(const std::string& name, const std::string& kind,
                          const OrderedJson& json);

  std::string folder_;
};

absl::Status FolderReader::ReadResult(const std::string& name, const std::string& kind,
                                      const OrderedJson& json) {
  const std::string where = folder_ + "/" + name;
  if (kind == "latency" || kind == "emulated") {
    const bool emulated = kind == "emulated";
    LOCKSTEP_ASSIGN_OR_RETURN(LatencyResult result, ParseLatency(json, where, emulated));
    LOCKSTEP_RETURN_IF_ERROR(CheckName(
        name, absl::StrFormat("%s.n%d.b%d.json", kind, result.num_ranks, result.batch_size)));
    (emulated ? data.emulated : data.latency).push_back(std::move(result));
    return absl::OkStatus();
  }
  if (kind == "profile") {
    const size_t before = data.profiles.size();
    LOCKSTEP_RETURN_IF_ERROR(ParseProfile(json, where, &data.profiles));
    if (data.profiles.size() == before) return absl::OkStatus();
    const ProfileResult& result = data.profiles.back();
    return CheckName(name,
                     absl::StrFormat("profile.n%d.b%d.json", result.num_ranks, result.batch_size));
  }
  ResultFields fields(json, where);
  const int64_t num_ranks = fields.Integer("num_ranks", 1, kMaxRanks);
  LOCKSTEP_RETURN_IF_ERROR(fields.status());
  LOCKSTEP_RETURN_IF_ERROR(CheckName(name, absl::StrFormat("%s.n%d.json", kind, num_ranks)));
  if (kind == "collectives") return ParseCollectives(json, where, &data.collectives);
  LOCKSTEP_ASSIGN_OR_RETURN(ThroughputResult result, ParseThroughput(json, where));
  data.throughput.push_back(std::move(result));
  return absl::OkStatus();
}

absl::Status FolderReader::Read(const std::string& name) {
  const std::string where = folder_ + "/" + name;
  const std::string kind = name.substr(0, name.find('.'));
  const bool is_answers = kind == "generate" && name.ends_with(".jsonl");
  const bool is_result = (kind == "latency" || kind == "emulated" || kind == "profile" ||
                          kind == "throughput" || kind == "collectives") &&
                         name.starts_with(kind + ".n") && name.ends_with(".json");
  if (!is_answers && !is_result && name != "run.json" && name != "plan.json") {
    return absl::OkStatus();
  }
  LOCKSTEP_ASSIGN_OR_RETURN(const std::string text, ReadFile(where));
  data.files.push_back(name);
  if (is_answers) {
    int num_ranks = 0;
    int used = 0;
    if (std::sscanf(name.c_str(), "generate.n%5d.jsonl%n", &num_ranks, &used) != 1 ||
        num_ranks < 1 || used != static_cast<int>(name.size())) {
      return absl::InvalidArgumentError(where + ": its name must be generate.nN.jsonl");
    }
    LOCKSTEP_ASSIGN_OR_RETURN(GeneratedAnswers answers, ParseAnswers(text, where, num_ranks));
    data.generated.push_back(std::move(answers));
    return absl::OkStatus();
  }
  LOCKSTEP_ASSIGN_OR_RETURN(OrderedJson json, ParseOrderedJson(text, where));
  if (!json.is_object()) return absl::InvalidArgumentError(where + ": no JSON object");
  if (name == "plan.json") return ParsePlan(json, where, &data);
  if (name != "run.json") return ReadResult(name, kind, json);
  data.run = std::move(json);
  return absl::OkStatus();
}

// A speed-up between runs of two devices or lengths would be none.
absl::Status CheckBelongTogether(const ReportData& data) {
  std::vector<LatencyResult> results = data.latency;
  results.insert(results.end(), data.emulated.begin(), data.emulated.end());
  for (const LatencyResult& one : results) {
    const auto same = [](const LatencyResult& r) {
      return std::tie(r.device, r.dtype, r.weights, r.input_len, r.output_len);
    };
    const LatencyResult& first = results[0];
    if (same(one) == same(first)) continue;
    const auto text = [](const LatencyResult& r) {
      return absl::StrFormat("N = %d, batch %d: %s, %s, weights: %s, %d + %d tokens", r.num_ranks,
                             r.batch_size, r.device, r.dtype, r.weights, r.input_len, r.output_len);
    };
    return absl::InvalidArgumentError(
        "results of different runs cannot be compared: " + text(first) + "; " + text(one));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ReportData> ReadReportData(const std::string& folder) {
  namespace fs = std::filesystem;
  std::error_code error;
  if (!fs::is_directory(folder, error)) {
    return absl::InvalidArgumentError(folder + ": no such folder of results");
  }
  std::vector<std::string> names;
  for (fs::directory_iterator file(folder, error), end; !error && file != end;
       file.increment(error)) {
    names.push_back(file->path().filename().string());
  }
  if (error) return absl::InvalidArgumentError(folder + ": " + error.message());
  std::sort(names.begin(), names.end());
  FolderReader reader(folder);
  for (const std::string& name : names) LOCKSTEP_RETURN_IF_ERROR(reader.Read(name));
  ReportData& data = reader.data;
  if (data.latency.empty()) {
    return absl::InvalidArgumentError(
        folder +
        ": no latency.nN.bB.json, results of `bench latency --json`; launch/scaling.sh "
        "writes them");
  }
  const auto by_batch_then_ranks = [](const auto& a, const auto& b) {
    return std::tie(a.batch_size, a.num_ranks) < std::tie(b.batch_size, b.num_ranks);
  };
  const auto by_ranks = [](const auto& a, const auto& b) { return a.num_ranks < b.num_ranks; };
  std::stable_sort(data.latency.begin(), data.latency.end(), by_batch_then_ranks);
  std::stable_sort(data.emulated.begin(), data.emulated.end(), by_batch_then_ranks);
  std::stable_sort(data.profiles.begin(), data.profiles.end(), by_batch_then_ranks);
  std::stable_sort(data.throughput.begin(), data.throughput.end(), by_ranks);
  std::stable_sort(data.collectives.begin(), data.collectives.end(), by_ranks);
  std::stable_sort(data.generated.begin(), data.generated.end(), by_ranks);
  LOCKSTEP_RETURN_IF_ERROR(CheckBelongTogether(data));
  return std::move(data);
}

}  // namespace lockstep
