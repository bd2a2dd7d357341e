// An open-loop load: requests are sent when their time comes, whatever became of those before.
//
// One thread, one connection a request. All times are seconds since the load's start.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "launch/bench/bench_server.h"
#include "launch/bench/token_stream.h"

namespace lockstep {

struct LoadOptions {
  SocketAddress server;
  BenchEndpoint endpoint = BenchEndpoint::kCompletions;
  int64_t max_concurrency = INT64_MAX;  // requests beyond it wait for a place
  double request_seconds = 0;           // longest time of a request; 0: no limit
  bool keeps_text = false;
  int stop_fd =
      -1;  // once it is readable, nothing is sent any more and what is open ends; -1: none
};

struct LoadRequest {
  double arrival = 0;   // ascending
  std::string message;  // the whole HTTP request
};

struct LoadRecord {
  std::string error;             // empty: the answer came whole
  int status = 0;                // of HTTP; 0: there was none
  std::optional<double> sent;    // the connection was begun; not before the arrival
  bool held = false;             // its time came while max_concurrency requests were open
  std::vector<double> arrivals;  // of tokens, as far as they came
  double last_event = 0;         // of the choice; with tokens alone
  double end = 0;                // of the request, well or not
  std::optional<int64_t> prompt_tokens;
  std::optional<int64_t> completion_tokens;
  std::string text;

  bool ok() const { return error.empty(); }
};

struct LoadResult {
  std::vector<LoadRecord> records;  // as the requests
  double duration = 0;              // from the start to the end of the last request
  int64_t max_open = 0;             // most requests that were open at once
  bool stopped = false;             // by stop_fd
};

// `on_end`, where given, is called after each request with how many have ended.
absl::StatusOr<LoadResult> RunLoad(const LoadOptions& options,
                                   const std::vector<LoadRequest>& requests,
                                   const std::function<void(size_t)>& on_end = {});

}  // namespace lockstep
