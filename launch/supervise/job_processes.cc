#include "launch/supervise/job_processes.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <utility>

namespace lockstep {

namespace {

sigset_t ChildSignals() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGCHLD);
  return set;
}

// In the new process, where only async-signal-safe functions may be called. Writes errno to
// `report` when the command cannot be started.
[[noreturn]] void Become(char* const* argv, pid_t supervisor, int report) {
  setpgid(0, 0);
  prctl(PR_SET_PDEATHSIG, SIGTERM);
  // It may have died before that.
  if (getppid() != supervisor) _exit(1);
  for (const int number : {SIGPIPE, SIGXFSZ}) std::signal(number, SIG_DFL);
  sigset_t none;
  sigemptyset(&none);
  pthread_sigmask(SIG_SETMASK, &none, nullptr);
  const int input = open("/dev/null", O_RDONLY | O_CLOEXEC);
  if (input >= 0 && dup2(input, STDIN_FILENO) >= 0) execvp(argv[0], argv);
  const int error = errno;
  if (write(report, &error, sizeof(error)) < 0) _exit(1);
  _exit(1);
}

// Of /proc/PID/stat: "PID (NAME) STATE PARENT ...", where NAME may hold anything. 0: gone.
pid_t ParentOf(const std::string& pid) {
  std::ifstream file("/proc/" + pid + "/stat");
  const std::string stat((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  const size_t name_end = stat.rfind(") ");
  if (name_end == std::string::npos || name_end + 4 > stat.size()) return 0;
  pid_t parent = 0;
  std::from_chars(stat.data() + name_end + 4, stat.data() + stat.size(), parent);
  return parent;
}

std::vector<pid_t> Children() {
  std::vector<pid_t> children;
  std::error_code error;
  for (std::filesystem::directory_iterator entry("/proc", error), end; entry != end && !error;
       entry.increment(error)) {
    const std::string name = entry->path().filename();
    pid_t pid = 0;
    const auto [rest, fault] = std::from_chars(name.data(), name.data() + name.size(), pid);
    const bool is_number = fault == std::errc() && rest == name.data() + name.size();
    if (is_number && ParentOf(name) == getpid()) children.push_back(pid);
  }
  return children;
}

}  // namespace

absl::StatusOr<JobProcesses> JobProcesses::Create() {
  const sigset_t set = ChildSignals();
  pthread_sigmask(SIG_BLOCK, &set, nullptr);
  OwnedFd ended(signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK));
  if (ended.get() < 0 || prctl(PR_SET_CHILD_SUBREAPER, 1) != 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("this system does not let processes be watched: ", std::strerror(errno)));
  }
  return JobProcesses(std::move(ended));
}

absl::Status JobProcesses::Start(const std::vector<std::string>& command) {
  std::vector<char*> argv;
  for (const std::string& arg : command) argv.push_back(const_cast<char*>(arg.c_str()));
  argv.push_back(nullptr);
  int report[2];
  if (pipe2(report, O_CLOEXEC) != 0) {
    return absl::FailedPreconditionError(absl::StrCat("pipe: ", std::strerror(errno)));
  }
  const OwnedFd reader(report[0]);
  OwnedFd writer(report[1]);
  const pid_t supervisor = getpid();
  const pid_t pid = fork();
  if (pid == 0) Become(argv.data(), supervisor, writer.get());
  int error = errno;
  if (pid > 0) {
    writer = OwnedFd();
    // The end of the file when the command runs.
    if (read(reader.get(), &error, sizeof(error)) <= 0) {
      command_ = pid;
      all_gone_ = false;
      wait_status_.reset();
      return absl::OkStatus();
    }
    waitpid(pid, nullptr, 0);
  }
  return absl::FailedPreconditionError(
      absl::StrFormat("cannot start %s: %s", command[0], std::strerror(error)));
}

void JobProcesses::Reap() {
  signalfd_siginfo info;
  while (read(ended_.get(), &info, sizeof(info)) > 0) {
  }
  while (true) {
    int status = 0;
    const pid_t pid = waitpid(-1, &status, WNOHANG);
    if (pid == 0) return;
    if (pid < 0) {
      all_gone_ = errno == ECHILD;
      return;
    }
    if (pid == command_) wait_status_ = status;
  }
}

void JobProcesses::Signal(int number) const {
  if (!all_gone_ && !wait_status_.has_value()) kill(command_, number);
}

std::vector<pid_t> JobProcesses::Kill() const {
  const std::vector<pid_t> children = Children();
  for (const pid_t pid : children) kill(pid, SIGKILL);
  return children;
}

}  // namespace lockstep
