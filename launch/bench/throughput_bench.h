// `lockstep bench throughput`: all prompts at once, from a file or random ones.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "launch/bench/random_prompts.h"
#include "launch/engine_flags.h"
#include "launch/option_parser.h"
#include "runtime/core/status.h"

namespace lockstep {

struct ThroughputBenchOptions {
  EngineFlags engine;
  RandomPrompts random;
  std::string prompts;                 // a file as of generate; empty: random prompts
  std::optional<int64_t> num_prompts;  // none: random.num_prompts, or all of the file
  bool chat = false;
  uint64_t seed = 0;
  bool json = false;
};

CommandSpec ThroughputBenchSpec(ThroughputBenchOptions* options);
absl::Status CheckThroughputBench(const ThroughputBenchOptions& options);
// Exit status. All ranks of the job call it alike; see launch/engine_session.h.
int RunThroughputBench(const ThroughputBenchOptions& options);

}  // namespace lockstep
