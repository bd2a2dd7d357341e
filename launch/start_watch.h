// A limit for the time in which the ranks find each other, before the watchdog of JobWatch can
// work: MPI's own start waits for ever for a process that is stopped, waits for a file, is no
// lockstep, or lives on a host that cannot be reached.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

namespace lockstep {

// Thread rule: one thread.
class StartWatch {
 public:
  // `seconds`: --watchdog-seconds; the limit is no less than kLeastSeconds, and 0 sets none. When
  // it has passed, says so in one line and ends this process with status 1, upon which the launcher
  // ends the others. `rank`: among what the launcher has started; the lower one speaks first.
  StartWatch(int rank, double seconds);
  ~StartWatch() { Stop(); }
  StartWatch(const StartWatch&) = delete;
  StartWatch& operator=(const StartWatch&) = delete;

  // The ranks have found each other. Idempotent.
  void Stop();

  // MPI's start takes seconds where many ranks share few cores.
  static constexpr double kLeastSeconds = 10;

 private:
  void Run(std::chrono::duration<double> limit);

  const int rank_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool stopped_ = false;
  std::thread thread_;  // the last: it uses the others
};

}  // namespace lockstep
