// One JSON line a step: what ran, how long, and what was left. Rank 0.
#pragma once

#include <chrono>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "runtime/scheduler.h"

namespace lockstep {

// A step as it landed, before its results changed what is scheduled.
struct StepRecord {
  uint64_t step = 0;
  std::chrono::system_clock::time_point landed_at;
  double seconds = 0;
  std::vector<ScheduledRows> rows;  // [B]
  SchedulerStats stats;
};

// Lines hold: step, time of landing (Unix, s), seconds (since the step before landed, or since this
// one was planned when that was later), tokens, prompt_tokens, requests [{id, choice, position,
// tokens, prompt_tokens}] in the order of the batch, waiting, running, free_blocks, cached_blocks,
// preemptions and finished (since the start). Written line by line, so that the last step before a
// fault can be read. Not thread-safe.
class StepLog {
 public:
  // Truncates the file. InvalidArgument, with the path and the reason, when it cannot be opened.
  static absl::StatusOr<std::unique_ptr<StepLog>> Create(const std::string& path);

  // Internal, with the path and the reason, when the line cannot be written.
  absl::Status Write(const StepRecord& record);

 private:
  struct Close {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  explicit StepLog(std::string path) : path_(std::move(path)) {}

  const std::string path_;
  std::unique_ptr<std::FILE, Close> file_;
};

}  // namespace lockstep
