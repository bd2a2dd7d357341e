// One JSON line a step: what ran, how long, and what was left. Rank 0.
#pragma once

#include <cstdio>
#include <memory>
#include <span>
#include <string>

#include "runtime/scheduler.h"

namespace lockstep {

// Lines hold: step, time (Unix, s), seconds (since the step before landed, or since this one was
// planned when that was later), tokens, prompt_tokens, requests [{id, choice, position, tokens,
// prompt_tokens}] in the order of the batch, waiting, running, free_blocks, cached_blocks,
// preemptions and finished (since the start). Written line by line, so that the last step before a
// fault can be read. Not thread-safe.
class StepLog {
 public:
  // Truncates the file. InvalidArgument, with the path and the reason, when it cannot be opened.
  static absl::StatusOr<std::unique_ptr<StepLog>> Create(const std::string& path);

  // Internal, with the path and the reason, when the line cannot be written.
  absl::Status Write(uint64_t step, double seconds, std::span<const ScheduledRows> rows,
                     const SchedulerStats& stats);

 private:
  struct Close {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  explicit StepLog(std::string path) : path_(std::move(path)) {}

  const std::string path_;
  std::unique_ptr<std::FILE, Close> file_;
};

}  // namespace lockstep
