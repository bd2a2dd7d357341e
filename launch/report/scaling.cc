#include "launch/report/scaling.h"

#include <algorithm>
#include <cmath>

namespace lockstep {

namespace {

// Rows of one phase and batch size: the first one, of the fewest ranks, is the base.
void FillSpeedups(std::vector<ScalingRow>& rows) {
  for (size_t i = 0, base = 0; i < rows.size(); ++i) {
    if (rows[i].phase != rows[base].phase || rows[i].batch_size != rows[base].batch_size) base = i;
    ScalingRow& row = rows[i];
    row.base_ranks = rows[base].num_ranks;
    row.speedup = rows[base].ms / row.ms;
    row.efficiency = row.speedup * row.base_ranks / row.num_ranks;
  }
}

std::vector<ScalingRow> RowsWithoutBase(const std::vector<LatencyResult>& results) {
  std::vector<ScalingRow> rows;
  for (const LatencyResult& r : results) {
    const double tokens = static_cast<double>(r.batch_size * r.input_len);
    rows.push_back({.phase = "prefill",
                    .batch_size = r.batch_size,
                    .num_ranks = r.num_ranks,
                    .ms = r.prefill_ms,
                    .spread = r.prefill_spread,
                    .tokens_per_second = tokens / r.prefill_ms * 1000});
  }
  for (const LatencyResult& r : results) {
    if (!r.decode_step_ms) continue;
    rows.push_back(
        {.phase = "decode",
         .batch_size = r.batch_size,
         .num_ranks = r.num_ranks,
         .ms = *r.decode_step_ms,
         .spread = r.decode_spread.value_or(0),
         .tokens_per_second = static_cast<double>(r.batch_size) / *r.decode_step_ms * 1000});
  }
  return rows;
}

Sameness Compare(const GeneratedAnswers& base, const GeneratedAnswers& other) {
  Sameness same;
  same.num_ranks = other.num_ranks;
  same.base_ranks = base.num_ranks;
  same.num_prompts = std::ssize(base.answers);
  for (size_t prompt = 0; prompt < base.answers.size(); ++prompt) {
    const std::vector<GeneratedToken>& a = base.answers[prompt];
    const std::vector<GeneratedToken>& b = other.answers[prompt];
    size_t i = 0;
    for (; i < std::min(a.size(), b.size()) && a[i].id == b[i].id; ++i) {
      ++same.compared_tokens;
      if (!a[i].logprob || !b[i].logprob) continue;
      same.max_logprob_difference =
          std::max(same.max_logprob_difference, std::abs(*a[i].logprob - *b[i].logprob));
    }
    if (i == a.size() && i == b.size()) {
      ++same.num_same;
      continue;
    }
    Parting parting = {.prompt = static_cast<int64_t>(prompt), .position = static_cast<int64_t>(i)};
    if (i < a.size()) {
      parting.base_id = a[i].id;
      if (a[i].top.size() > 1) parting.margin = a[i].top[0].second - a[i].top[1].second;
    }
    if (i < b.size()) parting.id = b[i].id;
    same.partings.push_back(parting);
  }
  return same;
}

}  // namespace

std::vector<ScalingRow> ScalingRows(const std::vector<LatencyResult>& results) {
  std::vector<ScalingRow> rows = RowsWithoutBase(results);
  FillSpeedups(rows);
  return rows;
}

absl::StatusOr<std::vector<ScalingRow>> EmulatedRows(const std::vector<LatencyResult>& results,
                                                     const std::vector<ScalingRow>& measured) {
  std::vector<ScalingRow> rows = RowsWithoutBase(results);
  for (ScalingRow& row : rows) {
    const auto base = std::find_if(measured.begin(), measured.end(), [&row](const ScalingRow& m) {
      return m.phase == row.phase && m.batch_size == row.batch_size;
    });
    if (base == measured.end()) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "emulated.n%d.b%d.json: there is no measured result of that batch size to compare with",
          row.num_ranks, row.batch_size));
    }
    row.base_ranks = base->num_ranks;
    row.speedup = base->ms / row.ms;
    row.efficiency = row.speedup * row.base_ranks / row.num_ranks;
  }
  return rows;
}

std::vector<ThroughputRow> ThroughputRows(const std::vector<ThroughputResult>& results) {
  std::vector<ThroughputRow> rows;
  for (const ThroughputResult& r : results) {
    ThroughputRow row = {.result = r, .base_ranks = results[0].num_ranks};
    const auto rate = [&r](int64_t n) { return static_cast<double>(n) / r.elapsed_seconds; };
    row.requests_per_second = rate(r.num_requests);
    row.input_tokens_per_second = rate(r.input_tokens);
    row.output_tokens_per_second = rate(r.output_tokens);
    row.tokens_per_second_per_rank = rate(r.input_tokens + r.output_tokens) / r.num_ranks;
    row.speedup = results[0].elapsed_seconds / r.elapsed_seconds;
    row.efficiency = row.speedup * row.base_ranks / r.num_ranks;
    rows.push_back(std::move(row));
  }
  return rows;
}

absl::StatusOr<std::vector<Sameness>> CompareAnswers(const std::vector<GeneratedAnswers>& answers) {
  std::vector<Sameness> all;
  for (size_t i = 1; i < answers.size(); ++i) {
    if (answers[i].answers.size() != answers[0].answers.size()) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "generate.n%d.jsonl has %d answers, generate.n%d.jsonl %d: not of the same prompts",
          answers[0].num_ranks, answers[0].answers.size(), answers[i].num_ranks,
          answers[i].answers.size()));
    }
    all.push_back(Compare(answers[0], answers[i]));
  }
  return all;
}

}  // namespace lockstep
