#include "launch/start_watch.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <system_error>

namespace lockstep {

namespace {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

// Of this process's own time: when it was stopped itself, others get their time anew.
constexpr Seconds kTick{0.25};
// What a launcher needs to end a job of which a rank has failed.
constexpr Seconds kTurn{3};
constexpr int kLastTurn = 3;

void Tell(int rank, Seconds limit) {
  char host[256] = "unknown host";
  gethostname(host, sizeof(host) - 1);
  std::fprintf(stderr,
               "lockstep error: rank %d (%s) has not found all other ranks within %.0f s "
               "(--watchdog-seconds, here %.0f or more): one of them is stopped, waits for a file, "
               "or is no lockstep, or their hosts cannot reach each other\n",
               rank, host, limit.count(), StartWatch::kLeastSeconds);
}

}  // namespace

StartWatch::StartWatch(int rank, double seconds) : rank_(rank) {
  if (seconds <= 0) return;
  const Seconds limit(std::max(seconds, kLeastSeconds));
  try {
    thread_ = std::thread([this, limit] { Run(limit); });
  } catch (const std::system_error&) {
    // No thread to be had: JobWatch::Start needs one, too, and refuses the start.
  }
}

void StartWatch::Stop() {
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void StartWatch::Run(Seconds limit) {
  const Seconds my_turn = limit + kTurn * std::min(rank_, kLastTurn);
  std::unique_lock lock(mutex_);
  for (Seconds waited(0); waited < my_turn;) {
    const Clock::time_point before = Clock::now();
    if (changed_.wait_for(lock, kTick, [this] { return stopped_; })) return;
    waited += std::min<Seconds>(Clock::now() - before, 2 * kTick);
  }
  // Not MPI_Abort, which waits for a start that hangs.
  Tell(rank_, my_turn);
  std::_Exit(1);
}

}  // namespace lockstep
