#include <optional>

#include "launch/report/report.h"

namespace lockstep {

namespace {

// RFC 4180: quotes around what holds a comma, a quote or a line's end.
std::string Field(const std::string& text) {
  if (text.find_first_of(",\"\r\n") == std::string::npos) return text;
  std::string quoted = "\"";
  for (const char c : text) quoted += c == '"' ? std::string("\"\"") : std::string(1, c);
  return quoted + "\"";
}

// What the numbers of a few lines belong to.
struct LineKey {
  std::string section;
  std::string phase = "";
  std::string name = "";
  int num_ranks = 0;
  std::optional<int64_t> batch_size = std::nullopt;
  std::optional<int64_t> x = std::nullopt;
};

class CsvText {
 public:
  void Add(const LineKey& key, const std::string& metric, const char* unit, double value) {
    AddText(key, metric, unit, OrderedJson(value).dump());  // the shortest that reads back
  }
  void Add(const LineKey& key, const std::string& metric, const char* unit, int64_t value) {
    AddText(key, metric, unit, absl::StrCat(value));
  }
  std::string Take() { return std::move(text_); }

 private:
  void AddText(const LineKey& key, const std::string& metric, const char* unit,
               const std::string& value) {
    const auto number = [](const std::optional<int64_t>& n) {
      return n ? absl::StrCat(*n) : std::string();
    };
    absl::StrAppend(&text_, Field(key.section), ",", Field(key.phase), ",", Field(key.name), ",",
                    key.num_ranks, ",", number(key.batch_size), ",", number(key.x), ",",
                    Field(metric), ",", unit, ",", value, "\n");
  }

  std::string text_ = "section,phase,name,num_ranks,batch_size,x,metric,unit,value\n";
};

void AddScaling(const std::vector<ScalingRow>& rows, const char* section, CsvText& csv) {
  for (const ScalingRow& row : rows) {
    const LineKey key = {.section = section,
                         .phase = row.phase,
                         .num_ranks = row.num_ranks,
                         .batch_size = row.batch_size};
    csv.Add(key, "ms", "ms", row.ms);
    csv.Add(key, "spread", "1", row.spread);
    csv.Add(key, "tokens_per_second", "tokens/s", row.tokens_per_second);
    csv.Add(key, "speedup", "1", row.speedup);
    csv.Add(key, "efficiency", "1", row.efficiency);
  }
}

void AddThroughput(const Report& report, CsvText& csv) {
  for (const ThroughputRow& row : report.throughput) {
    const LineKey key = {.section = "throughput", .num_ranks = row.result.num_ranks};
    csv.Add(key, "num_requests", "requests", row.result.num_requests);
    csv.Add(key, "elapsed_seconds", "s", row.result.elapsed_seconds);
    csv.Add(key, "requests_per_second", "requests/s", row.requests_per_second);
    csv.Add(key, "input_tokens_per_second", "tokens/s", row.input_tokens_per_second);
    csv.Add(key, "output_tokens_per_second", "tokens/s", row.output_tokens_per_second);
    csv.Add(key, "tokens_per_second_per_rank", "tokens/s", row.tokens_per_second_per_rank);
    csv.Add(key, "speedup", "1", row.speedup);
    csv.Add(key, "efficiency", "1", row.efficiency);
  }
}

void AddWhereTimeGoes(const ReportData& data, CsvText& csv) {
  for (const ProfileResult& profile : data.profiles) {
    for (const ProfileResult::Rank& rank : profile.ranks) {
      const LineKey key = {.section = "profile",
                           .phase = profile.phase,
                           .name = rank.host,
                           .num_ranks = profile.num_ranks,
                           .batch_size = profile.batch_size,
                           .x = rank.rank};
      csv.Add(key, "step_ms", "ms", rank.step_ms);
      for (const auto& [name, ms] : rank.parts_ms) csv.Add(key, name, "ms", ms);
    }
  }
  for (const CollectiveResult& row : data.collectives) {
    const LineKey key = {.section = "collectives",
                         .name = row.algorithm,
                         .num_ranks = row.num_ranks,
                         .x = row.bytes};
    csv.Add(key, "us", "us", row.us);
    csv.Add(key, "algbw_bytes_per_second", "bytes/s", row.algbw);
    csv.Add(key, "busbw_bytes_per_second", "bytes/s", row.busbw);
  }
}

void AddSameness(const std::vector<Sameness>& all, CsvText& csv) {
  for (const Sameness& same : all) {
    LineKey key = {.section = "sameness", .num_ranks = same.num_ranks};
    csv.Add(key, "num_prompts", "prompts", same.num_prompts);
    csv.Add(key, "num_same", "prompts", same.num_same);
    csv.Add(key, "compared_tokens", "tokens", same.compared_tokens);
    csv.Add(key, "max_logprob_difference", "nat", same.max_logprob_difference);
    for (const Parting& parting : same.partings) {
      key.x = parting.prompt;
      csv.Add(key, "parting_position", "tokens", parting.position);
      if (parting.margin) csv.Add(key, "parting_margin", "nat", *parting.margin);
    }
  }
}

void AddPoint(const StepFit& fit, const FitPoint& point, LineKey key, CsvText& csv) {
  key.phase = point.phase;
  key.num_ranks = point.num_ranks;
  key.batch_size = point.batch_size;
  csv.Add(key, "fitted_ms", "ms", FittedSeconds(fit, point) * 1000);
  for (int term = 0; term < kNumFitTerms; ++term) {
    csv.Add(key, absl::StrCat(FitTermName(term), "_ms"), "ms",
            TermSeconds(fit, point, term) * 1000);
  }
}

void AddFit(const Report& report, CsvText& csv) {
  if (!report.fit.not_made.empty()) return;
  for (const FitPoint& point : report.fit.points) {
    AddPoint(report.fit, point, {.section = "fit"}, csv);
  }
  for (const FitPrediction& prediction : report.predictions) {
    const LineKey key = {.section = "prediction",
                         .phase = prediction.point.phase,
                         .num_ranks = prediction.point.num_ranks,
                         .batch_size = prediction.point.batch_size};
    AddPoint(report.fit, prediction.point, key, csv);
    csv.Add(key, "speedup", "1", prediction.speedup);
    csv.Add(key, "efficiency", "1", prediction.efficiency);
  }
}

}  // namespace

std::string ReportCsv(const Report& report) {
  CsvText csv;
  AddScaling(report.scaling, "latency", csv);
  AddScaling(report.emulated, "emulated", csv);
  AddThroughput(report, csv);
  AddWhereTimeGoes(report.data, csv);
  AddSameness(report.sameness, csv);
  AddFit(report, csv);
  return csv.Take();
}

}  // namespace lockstep
