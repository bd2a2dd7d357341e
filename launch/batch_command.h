// `lockstep batch`: a file of requests, answered line by line into another file.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "launch/batch/batch_progress.h"
#include "launch/batch/batch_writer.h"
#include "launch/engine_flags.h"
#include "launch/sampling_defaults.h"

namespace lockstep {

struct BatchOptions {
  EngineFlags engine;
  std::string input;                            // "-": stdin
  std::string output;                           // "-": stdout
  std::vector<std::string> served_model_names;  // empty: MODEL as given
  std::string chat_template;                    // path; empty: the model's own
  SamplingFlags sampling;                       // of lines that do not say
  bool ordered = false;
  bool retry_failed = false;
  bool force = false;        // goes on although model, input or sampling defaults have changed
  double lock_seconds = 10;  // to wait for another writer of the output
  FsyncPolicy fsync = FsyncPolicy::kEverySecond;
  ProgressKind progress = ProgressKind::kAuto;
};

// Exit status: 0 every line was answered; 1 some failed, or the job ended before its end; 2 refused
// before any work, or no line could be answered. All ranks of the job call it alike; see
// launch/engine_session.h. Rank 0 reads and writes.
int RunBatch(const BatchOptions& options);

}  // namespace lockstep
