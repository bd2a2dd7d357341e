// Speed-up and efficiency over N, and whether all N give the same answers.
//
//   speed-up(N) = t(base) / t(N)        efficiency(N) = speed-up(N) / (N / base)
//
// base is the smallest N of which there is a result (of that batch size).
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "launch/report/report_data.h"

namespace lockstep {

struct ScalingRow {
  std::string phase;  // "prefill": a whole batch of prompts; "decode": one step; medians
  int64_t batch_size = 0;
  int num_ranks = 0;
  int base_ranks = 0;
  double ms = 0;
  double spread = 0;             // as LatencyResult
  double tokens_per_second = 0;  // prefill: prompt tokens; decode: a token a request and step
  double speedup = 0;
  double efficiency = 0;
};
// By phase (prefill first), batch size, N.
std::vector<ScalingRow> ScalingRows(const std::vector<LatencyResult>& results);

// The same of emulated ranks, against the measured base of `measured`: speed-up and efficiency that
// compute alone would have, an upper bound. InvalidArgument for a batch size that has no base.
absl::StatusOr<std::vector<ScalingRow>> EmulatedRows(const std::vector<LatencyResult>& results,
                                                     const std::vector<ScalingRow>& measured);

struct ThroughputRow {
  ThroughputResult result;
  int base_ranks = 0;
  double requests_per_second = 0;
  double input_tokens_per_second = 0;
  double output_tokens_per_second = 0;
  double tokens_per_second_per_rank = 0;  // of both kinds
  double speedup = 0;                     // of the elapsed time
  double efficiency = 0;
};
std::vector<ThroughputRow> ThroughputRows(const std::vector<ThroughputResult>& results);

// Where the ids of an answer first differ from those of the base.
struct Parting {
  int64_t prompt = 0;                             // index
  int64_t position = 0;                           // of the answer, from 0
  std::optional<int32_t> base_id = std::nullopt;  // none: that answer has ended
  std::optional<int32_t> id = std::nullopt;
  // How much likelier (natural logarithm) the base holds its best token than its second best
  // there: 0 is a tie, which any rounding decides. None: the base has no two candidates.
  std::optional<double> margin = std::nullopt;
};

// N against base. Log-probabilities are compared where all ids so far, that one included, agree:
// beyond, the two continue different texts.
struct Sameness {
  int num_ranks = 0;
  int base_ranks = 0;
  int64_t num_prompts = 0;
  int64_t num_same = 0;         // answers with the same ids throughout
  int64_t compared_tokens = 0;  // positions where ids agree so far
  double max_logprob_difference = 0;
  std::vector<Parting> partings;  // one an answer that differs, in the order of prompts
};
// InvalidArgument when the numbers of answers differ.
absl::StatusOr<std::vector<Sameness>> CompareAnswers(const std::vector<GeneratedAnswers>& answers);

}  // namespace lockstep
