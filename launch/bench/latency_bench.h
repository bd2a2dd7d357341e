// `lockstep bench latency`: one batch at a time, from its prompts to its last token.
#pragma once

#include <cstdint>

#include "launch/engine_flags.h"
#include "launch/option_parser.h"
#include "runtime/core/status.h"

namespace lockstep {

struct LatencyBenchOptions {
  EngineFlags engine;
  int64_t batch_size = 8;
  int64_t input_len = 32;
  int64_t output_len = 128;
  int64_t warmup = 2;
  int64_t repeats = 10;
  uint64_t seed = 0;
  bool json = false;
};

CommandSpec LatencyBenchSpec(LatencyBenchOptions* options);
absl::Status CheckLatencyBench(const LatencyBenchOptions& options);
// Exit status. All ranks of the job call it alike; see launch/engine_session.h.
int RunLatencyBench(const LatencyBenchOptions& options);

}  // namespace lockstep
