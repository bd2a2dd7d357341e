#include "runtime/core/progress.h"

#include <unistd.h>

#include <cstdio>

#include "absl/strings/str_format.h"
#include "runtime/core/log.h"

namespace lockstep {

namespace {
constexpr std::chrono::milliseconds kQuiet{500};  // what takes less needs no line
constexpr std::chrono::milliseconds kInterval{100};
constexpr double kGigabyte = 1e9;
}  // namespace

std::string ProgressText(const std::string& what, int64_t done_bytes, int64_t total_bytes,
                         double seconds) {
  const double done = static_cast<double>(done_bytes), total = static_cast<double>(total_bytes);
  return absl::StrFormat("%s: %.0f%%, %.1f of %.1f GB, %.1f GB/s", what,
                         total > 0 ? 100 * done / total : 100.0, done / kGigabyte,
                         total / kGigabyte, done / kGigabyte / seconds);
}

ProgressLine::ProgressLine(std::string what, int64_t total_bytes)
    : what_(std::move(what)),
      total_bytes_(total_bytes),
      visible_(isatty(STDERR_FILENO) != 0 && LogIsOn(LogLevel::kInfo)),
      next_(start_ + kQuiet) {}

ProgressLine::~ProgressLine() {
  if (shown_) std::fputs("\r\033[K", stderr);
}

void ProgressLine::Add(int64_t bytes) {
  const int64_t done = done_bytes_.fetch_add(bytes) + bytes;
  if (visible_) Show(done);
}

void ProgressLine::Show(int64_t done) {
  // Whoever finds another thread at it goes on working.
  const std::unique_lock lock(mutex_, std::try_to_lock);
  const Clock::time_point now = Clock::now();
  if (!lock.owns_lock() || now < next_) return;
  next_ = now + kInterval;
  shown_ = true;
  const double seconds = std::chrono::duration<double>(now - start_).count();
  std::fprintf(stderr, "\r%s\033[K", ProgressText(what_, done, total_bytes_, seconds).c_str());
}

}  // namespace lockstep
