// `lockstep bench collectives`: the sums between the ranks of an mpirun, by size.
#pragma once

#include <cstdint>
#include <vector>

#include "launch/engine_flags.h"
#include "launch/option_parser.h"
#include "runtime/core/status.h"

namespace lockstep {

struct CollectivesBenchOptions {
  // Of it, what ranks must be given alike, the device and the watchdog.
  EngineFlags engine;
  std::vector<int64_t> sizes;  // bytes
  int64_t warmup = 5;
  int64_t repeats = 50;
  bool json = false;

  CollectivesBenchOptions();
};

CommandSpec CollectivesBenchSpec(CollectivesBenchOptions* options);
// COLLECTIVE over all processes of the job. Exit status, the same on all ranks.
int RunCollectivesBench(const CollectivesBenchOptions& options);

}  // namespace lockstep
