// The watchdog of an engine command (parallel/rank_watch.h), and how a job ends that cannot go on:
// one line on stderr for the whole job, rank 0's job told, all ranks ended with status 1.
#pragma once

#include <functional>
#include <memory>

#include "launch/start_watch.h"
#include "parallel/communicator.h"
#include "parallel/rank_links.h"
#include "parallel/rank_watch.h"

namespace lockstep {

class JobWatch {
 public:
  // `start_watch` watches until Start has succeeded. `on_failure`: rank 0's, called once before the
  // job is aborted, perhaps from another thread while the main thread hangs. Returns soon. Null on
  // other ranks.
  JobWatch(StartWatch& start_watch, std::function<void(const absl::Status&)> on_failure)
      : start_watch_(start_watch), on_failure_(std::move(on_failure)) {}
  ~JobWatch() { Stop(); }

  // What the engine shows its progress to, watched or not.
  WatchedRank& watched() { return watched_; }

  // COLLECTIVE. From now on, ranks that are gone or hang for `seconds` end the job; 0: they do not.
  // Errors as RankWatch::Create. `communicator` is used during the call alone.
  absl::Status Start(Communicator& communicator, double seconds);
  // The launcher has asked this process to end, and will kill all ranks soon, which is no fault of
  // theirs. For commands that take its signal; safe in a signal's handler.
  static void LauncherEnds();
  // This rank's end is none that others need to hear of.
  void Stop();

  // A fault after the start: says whose it is, whatever the log level, and ends the job. One thread
  // calls it, which does nothing more.
  [[noreturn]] void Fail(const Communicator& communicator, const absl::Status& status);

 private:
  void Report(const RankFault& fault);
  [[noreturn]] void End(const RankFault& fault, bool told);

  StartWatch& start_watch_;
  const std::function<void(const absl::Status&)> on_failure_;
  WatchedRank watched_;
  std::unique_ptr<RankWatch> watch_;
};

}  // namespace lockstep
