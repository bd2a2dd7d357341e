// A line on stderr that is written over itself while something takes long.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>

namespace lockstep {

// Shown where a person may look on: stderr is a terminal, and messages of level info are logged
// (so on no rank that was told to be silent). Nothing is shown in the first half second. Thread
// rule: Add from any threads.
class ProgressLine {
 public:
  // "WHAT: 37%, 5.6 of 15.2 GB, 18.1 GB/s".
  ProgressLine(std::string what, int64_t total_bytes);
  ~ProgressLine();  // wipes the line
  ProgressLine(const ProgressLine&) = delete;
  ProgressLine& operator=(const ProgressLine&) = delete;

  void Add(int64_t bytes);

 private:
  using Clock = std::chrono::steady_clock;
  void Show(int64_t done);

  const std::string what_;
  const int64_t total_bytes_;
  const bool visible_;
  const Clock::time_point start_ = Clock::now();
  std::atomic<int64_t> done_bytes_ = 0;
  std::mutex mutex_;        // of the fields below
  Clock::time_point next_;  // when to show again
  bool shown_ = false;
};

// The text, apart from where it goes. seconds > 0.
std::string ProgressText(const std::string& what, int64_t done_bytes, int64_t total_bytes,
                         double seconds);

}  // namespace lockstep
