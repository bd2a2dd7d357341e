// When a job that has failed is started again, and what its end was.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

namespace lockstep {

// At most `max_restarts` in a row, after 1, 2, 4, ... 60 seconds. Both begin anew when the server
// has been ready for kSteadyTime before it failed.
class RestartPolicy {
 public:
  using Duration = std::chrono::steady_clock::duration;
  static constexpr std::chrono::minutes kSteadyTime{10};
  static constexpr std::chrono::seconds kLongestWait{60};

  explicit RestartPolicy(int64_t max_restarts) : max_restarts_(max_restarts) {}

  // The job has failed after the server was ready for `ready_time`: how long to wait until the next
  // start; none: no restart is left.
  std::optional<std::chrono::seconds> Next(Duration ready_time);
  // Of the restart that Next has granted last, from 1.
  int64_t number() const { return used_; }

 private:
  const int64_t max_restarts_;
  int64_t used_ = 0;
};

// Exit status as a shell tells it: 128 + the signal's number for a process that a signal has ended.
int ExitStatusOf(int wait_status);
// What ended `command`, for a message. mpirun exits with 128 + N when signal N has ended a rank.
std::string DescribeEnd(const std::string& command, int wait_status);

}  // namespace lockstep
