#include "parallel/process_fate.h"

#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstring>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "runtime/core/status.h"

namespace lockstep {

namespace {

// Of /proc/PID/stat (proc(5)), counted from the one behind the name.
constexpr size_t kState = 0, kFlags = 6, kStartTime = 19, kExitCode = 49;
constexpr uint64_t kExiting = 4;  // PF_EXITING of its flags

// Empty where there is no such process.
std::vector<std::string> StatFields(int64_t pid) {
  FILE* const file = fopen(absl::StrFormat("/proc/%d/stat", pid).c_str(), "re");
  if (file == nullptr) return {};
  std::array<char, 2048> text = {};
  const size_t length = fread(text.data(), 1, text.size() - 1, file);
  fclose(file);
  // "pid (name) S ...": the name may itself hold parentheses and blanks.
  const char* const name_end = length > 0 ? strrchr(text.data(), ')') : nullptr;
  if (name_end == nullptr || strlen(name_end) < 3) return {};
  return absl::StrSplit(name_end + 2, absl::ByAnyChar(" \n"));
}

uint64_t StartTicks(const std::vector<std::string>& fields) {
  uint64_t ticks = 0;
  return fields.size() > kStartTime && absl::SimpleAtoi(fields[kStartTime], &ticks) ? ticks : 0;
}

// Its fields when it is still the same process, and of this host.
std::vector<std::string> FieldsOf(const ProcessIdentity& process) {
  std::vector<std::string> fields = StatFields(process.pid);
  if (process.start_ticks == 0 || StartTicks(fields) != process.start_ticks) return {};
  return fields;
}

}  // namespace

ProcessIdentity ProcessOf(int64_t pid) { return {pid, StartTicks(StatFields(pid))}; }

ProcessIdentity ThisProcess() { return ProcessOf(getpid()); }

std::string HowItEnded(const ProcessIdentity& process) {
  const std::vector<std::string> fields = FieldsOf(process);
  int status = 0;
  if (fields.size() <= kExitCode || !absl::SimpleAtoi(fields[kExitCode], &status)) return "";
  uint64_t flags = 0;
  const bool is_ending = fields[kState] == "Z" || fields[kState] == "X" ||
                         (absl::SimpleAtoi(fields[kFlags], &flags) && (flags & kExiting) != 0);
  if (WIFSIGNALED(status)) {
    const char* const name = sigabbrev_np(WTERMSIG(status));
    return absl::StrCat("was killed by ", name == nullptr ? "signal " : "SIG",
                        name == nullptr ? absl::StrCat(WTERMSIG(status)) : name);
  }
  // A process that runs on has a status of 0, too.
  if (status == 0 && !is_ending) return "";
  return absl::StrCat("ended with exit status ", WEXITSTATUS(status));
}

bool IsStopped(const ProcessIdentity& process) {
  const std::vector<std::string> fields = FieldsOf(process);
  return !fields.empty() && (fields[kState] == "T" || fields[kState] == "t");
}

}  // namespace lockstep
