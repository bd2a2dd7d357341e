// Where the time of a start goes.
#pragma once

#include <chrono>
#include <string>
#include <utility>
#include <vector>

namespace lockstep {

// Thread rule: one thread.
class PhaseTimes {
 public:
  // The time since the last call, or since this was made, belongs to `phase`.
  void End(std::string phase);
  double total_seconds() const;
  // "MPI 0.05 s, weights 1.31 s, graphs 0.40 s": in order, without what took less than 5 ms.
  std::string ToString() const;

 private:
  using Clock = std::chrono::steady_clock;
  const Clock::time_point start_ = Clock::now();
  Clock::time_point last_ = start_;
  std::vector<std::pair<std::string, double>> phases_;
};

}  // namespace lockstep
