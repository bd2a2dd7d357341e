// What a load on a server came to: vLLM's names (`vllm bench serve`), and a few of our own.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "launch/bench/load_generator.h"
#include "launch/bench/serve_bench.h"
#include "runtime/core/json.h"

namespace lockstep {

// Of one request that was answered. Milliseconds.
struct ServedRequest {
  double ttft = 0;             // from sending to the first token
  std::vector<double> itl;     // between arrivals of tokens
  std::optional<double> tpot;  // (e2el - ttft) / (output tokens - 1); none of a single token
  double e2el = 0;             // from sending to the last event of the answer
  int64_t input_tokens = 0;    // what the server says, else what was sent, else 0
  int64_t output_tokens = 0;   // what the server says, else the arrivals
};
// `record` is OK.
ServedRequest MeasureRequest(const LoadRecord& record, std::optional<int64_t> sent_tokens);

// What was asked for.
struct ServeRun {
  std::string model;
  std::vector<double> arrivals;                       // of the schedule, by request
  std::vector<std::optional<int64_t>> prompt_tokens;  // where they are known
  bool as_ids = false;
  std::string date;  // 20250131-235959
};

// With --save-detailed also the lists that have an entry for each request.
OrderedJson ServeResult(const ServeBenchOptions& options, const ServeRun& run,
                        const LoadResult& load);
// The table, in vLLM's form. `result` is ServeResult's.
std::string ServeTable(const ServeBenchOptions& options, const OrderedJson& result);

}  // namespace lockstep
