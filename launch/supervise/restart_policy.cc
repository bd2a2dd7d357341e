#include "launch/supervise/restart_policy.h"

#include <sys/wait.h>

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace lockstep {

namespace {

// "SIGKILL"; empty for a number that is no signal's.
std::string SignalName(int number) {
  const char* const name = sigabbrev_np(number);
  return name == nullptr ? "" : absl::StrCat("SIG", name);
}

}  // namespace

std::optional<std::chrono::seconds> RestartPolicy::Next(Duration ready_time) {
  if (ready_time >= kSteadyTime) used_ = 0;
  if (used_ >= max_restarts_) return std::nullopt;
  ++used_;
  const std::chrono::seconds doubled(int64_t{1} << std::min<int64_t>(used_ - 1, 30));
  return std::min(doubled, kLongestWait);
}

int ExitStatusOf(int wait_status) {
  return WIFSIGNALED(wait_status) ? 128 + WTERMSIG(wait_status) : WEXITSTATUS(wait_status);
}

std::string DescribeEnd(const std::string& command, int wait_status) {
  if (WIFSIGNALED(wait_status)) {
    return absl::StrCat(command, " was ended by ", SignalName(WTERMSIG(wait_status)));
  }
  const int status = WEXITSTATUS(wait_status);
  const std::string signal = SignalName(status - 128);
  const std::string exit = absl::StrCat("exit status ", status);
  return signal.empty() ? exit : absl::StrCat(exit, ": a rank was ended by ", signal);
}

}  // namespace lockstep
