// What `lockstep generate` says at its end.
#pragma once

#include <chrono>
#include <cstdint>
#include <vector>

#include "launch/engine_session.h"
#include "runtime/engine.h"

namespace lockstep {

// Time to the first token of each prompt.
class FirstTokenTimes {
 public:
  void Start(size_t num_prompts);
  // The prompt has got a token, be it not its first.
  void Note(size_t prompt);

  int64_t count() const { return count_; }
  double sum_seconds() const { return sum_; }
  double max_seconds() const { return max_; }

 private:
  std::chrono::steady_clock::time_point start_;
  std::vector<bool> noted_;
  int64_t count_ = 0;
  double sum_ = 0;
  double max_ = 0;
};

void LogStatistics(const EngineStats& stats, const SessionInfo& session,
                   const FirstTokenTimes& first_tokens);

}  // namespace lockstep
