// `lockstep bench serve`: an open-loop load on any server of OpenAI's API.
#pragma once

#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "launch/bench/bench_server.h"
#include "launch/bench/random_prompts.h"
#include "launch/bench/token_stream.h"
#include "launch/option_parser.h"
#include "runtime/core/status.h"

namespace lockstep {

// Of a request; "itl" has a value for each token but the first.
inline constexpr const char* kServeMetrics[] = {"ttft", "tpot", "itl", "e2el"};

struct ServeBenchOptions {
  std::optional<BaseUrl> server;
  std::string model;  // empty: the first that the server lists
  std::string api_key;
  BenchEndpoint endpoint = BenchEndpoint::kCompletions;
  double connect_seconds = 10;

  double request_rate = std::numeric_limits<double>::infinity();
  double burstiness = 1;
  std::optional<int64_t> max_concurrency;
  double request_seconds = 600;  // 0: no limit
  bool test_request = true;

  std::string prompts;                 // a file; empty: random prompts
  std::optional<int64_t> num_prompts;  // none: random.num_prompts, or all of the file
  RandomPrompts random;
  int64_t vocab_size = 256;
  std::optional<bool> ignore_eos;  // none: of random prompts
  uint64_t seed = 0;

  std::vector<std::string> metrics = {"ttft", "tpot", "itl", "e2el"};
  std::vector<double> percentiles = {90, 99};
  std::map<std::string, double> goodput_ms;  // by metric, of ttft, tpot, e2el

  bool json = false;
  bool save_result = false;
  bool save_detailed = false;
  std::string result_dir;
  std::string result_filename;
};

CommandSpec ServeBenchSpec(ServeBenchOptions* options);
absl::Status CheckServeBench(const ServeBenchOptions& options);
// Exit status. One process, without MPI.
int RunServeBench(const ServeBenchOptions& options);

}  // namespace lockstep
