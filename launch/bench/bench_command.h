// `lockstep bench KIND`: measurements. A file a kind; this one has the table of kinds.
#pragma once

#include <span>
#include <string>

#include "launch/bench/collectives_bench.h"
#include "launch/bench/latency_bench.h"
#include "launch/bench/serve_bench.h"
#include "launch/bench/throughput_bench.h"
#include "launch/option_parser.h"
#include "runtime/core/status.h"

namespace lockstep {

struct BenchOptions;

struct BenchKind {
  const char* name;  // "latency"
  bool takes_ranks;  // else it runs once, also where mpirun starts several
  CommandSpec (*spec)(BenchOptions* options);
  // What no single option can tell.
  absl::Status (*check)(const BenchOptions& options);
  // Exit status.
  int (*run)(const BenchOptions& options);
};

// The options of all kinds, of which those of `kind` count.
struct BenchOptions {
  const BenchKind* kind = nullptr;
  LatencyBenchOptions latency;
  ThroughputBenchOptions throughput;
  ServeBenchOptions serve;
  CollectivesBenchOptions collectives;
};

// What follows "bench" on the command line. When that asks for help, `help` gets the text, and the
// options are of no use. InvalidArgument otherwise, with the help command to try at its end.
absl::StatusOr<BenchOptions> ParseBench(std::span<const std::string> args, std::string* help);

inline constexpr char kBenchSummary[] =
    "measures latency, throughput, servers, and sums between ranks";

}  // namespace lockstep
