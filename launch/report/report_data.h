// The results that launch/scaling.sh leaves in a folder, read and checked.
//
//   run.json                   model, ranks that were asked for, commands, machine, versions
//   plan.json                  `lockstep plan MODEL --json`: the model's shape
//   latency.nN.bB.json         `bench latency --json` on N ranks with B requests at once
//   profile.nN.bB.json         the same with --profile: where a step's time goes
//   emulated.nN.bB.json        `bench latency --emulate-tp N`: one rank's compute, without
//   all-reduces throughput.nN.json         `bench throughput --json` collectives.nN.json `bench
//   collectives --json` generate.nN.jsonl          `generate --json --logprobs`: the same prompts
//   at each N
//
// Which there are is not fixed: a report is made of what is there, and says what is not. N and B
// come from the contents; a file whose name says otherwise is refused.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "model/model_config.h"
#include "runtime/core/json.h"
#include "runtime/core/status.h"

namespace lockstep {

// Of one batch size on N ranks. Times are medians in milliseconds; decode has none when answers
// have one token.
struct LatencyResult {
  int num_ranks = 0;
  int64_t batch_size = 0;
  int64_t input_len = 0;
  int64_t output_len = 0;
  int64_t repeats = 0;
  int num_threads = 0;  // of a rank
  std::string device;   // "cpu", "cuda"
  std::string dtype;
  std::string weights;  // "checkpoint", "dummy", "null"
  double prefill_ms = 0;
  std::optional<double> decode_step_ms;
  double ttft_ms = 0;
  std::optional<double> tpot_ms;
  // Half of the distance from the least to the most over the median: how much repeats differ.
  double prefill_spread = 0;
  std::optional<double> decode_spread;
};

struct ThroughputResult {
  int num_ranks = 0;
  int64_t num_requests = 0;
  double elapsed_seconds = 0;
  int64_t input_tokens = 0;
  int64_t output_tokens = 0;
};

// A phase of `bench latency --profile`: milliseconds of a step by part.
struct ProfileResult {
  int num_ranks = 0;
  int64_t batch_size = 0;
  std::string phase;  // "prefill", "decode"
  int64_t steps = 0;
  struct Rank {
    int rank = 0;
    std::string host;
    double step_ms = 0;
    std::vector<std::pair<std::string, double>> parts_ms;  // in the file's order
  };
  std::vector<Rank> ranks;
  std::optional<int> straggler;
  double straggler_work_ms = 0;
  double mean_work_ms = 0;
};

// A line of an all-reduce table.
struct CollectiveResult {
  int num_ranks = 0;
  std::string algorithm;
  int64_t bytes = 0;
  double us = 0;                // median
  double algbw = 0, busbw = 0;  // bytes/s
};

struct GeneratedToken {
  int32_t id = 0;
  std::optional<double> logprob;                // none: minus infinity
  std::vector<std::pair<int32_t, double>> top;  // most likely first
};
// The answers of N ranks, a list of tokens a prompt.
struct GeneratedAnswers {
  int num_ranks = 0;
  std::vector<std::vector<GeneratedToken>> answers;
};

struct ReportData {
  OrderedJson run;                      // null without run.json
  std::optional<ModelConfig> shape;     // of plan.json; of it only what step_cost.h reads
  std::string kv_dtype;                 // of plan.json
  std::vector<LatencyResult> latency;   // by batch size, then N
  std::vector<LatencyResult> emulated;  // num_ranks is the N that one rank emulated
  std::vector<ThroughputResult> throughput;
  std::vector<ProfileResult> profiles;
  std::vector<CollectiveResult> collectives;
  std::vector<GeneratedAnswers> generated;
  std::vector<std::string> files;  // that were read, sorted
};

// InvalidArgument, naming file and field: no such folder, no latency result in it, a file that is
// no result, results that do not belong together (another model, type, device or lengths).
absl::StatusOr<ReportData> ReadReportData(const std::string& folder);

}  // namespace lockstep
