#include "parallel/launcher_guard.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "runtime/core/file.h"
#include "runtime/core/status.h"

namespace lockstep {
namespace {

struct Process {
  std::string name;
  pid_t parent = 0;
};

// The name is empty where there is no such process.
Process Describe(pid_t pid) {
  const absl::StatusOr<std::string> stat = ReadFile(absl::StrFormat("/proc/%d/stat", pid));
  if (!stat.ok()) return {};
  // "pid (name) state parent ...": the name may hold parentheses itself.
  const size_t begin = stat->find('('), end = stat->rfind(')');
  if (begin == std::string::npos || end == std::string::npos || end < begin) return {};
  Process process = {stat->substr(begin + 1, end - begin - 1)};
  if (std::sscanf(stat->c_str() + end + 1, " %*c %d", &process.parent) != 1) return {};
  return process;
}

bool IsLauncher(const std::string& name) {
  for (const char* launcher : {"mpirun", "mpiexec", "orterun", "orted", "prterun", "prted"}) {
    if (name == launcher) return true;
  }
  return false;
}

// 0: none. A script may stand between the launcher and its rank.
pid_t FindLauncher() {
  constexpr int kMaxScripts = 8;
  pid_t pid = getppid();
  for (int i = 0; i <= kMaxScripts && pid > 1; ++i) {
    const Process process = Describe(pid);
    if (IsLauncher(process.name)) return pid;
    pid = process.parent;
  }
  return 0;
}

}  // namespace

void KillLauncherLater(std::chrono::milliseconds patience) {
  const pid_t launcher = FindLauncher();
  if (launcher == 0) return;
  // Names the process also when its number is given to another one.
  const int handle = static_cast<int>(syscall(SYS_pidfd_open, launcher, 0));
  if (handle < 0) return;
  // From here on the child calls the system alone: other threads may have held locks. It must let
  // go of the pipes to the launcher, which waits for their end.
  if (_Fork() != 0) {
    close(handle);
    return;
  }
  setsid();
  if (handle > 0) syscall(SYS_close_range, 0U, static_cast<unsigned>(handle) - 1, 0U);
  syscall(SYS_close_range, static_cast<unsigned>(handle) + 1, ~0U, 0U);
  pollfd ended = {.fd = handle, .events = POLLIN, .revents = 0};
  if (poll(&ended, 1, static_cast<int>(patience.count())) == 0) {
    syscall(SYS_pidfd_send_signal, handle, SIGKILL, nullptr, 0U);
  }
  _exit(0);
}

}  // namespace lockstep
