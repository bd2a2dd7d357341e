// The watchdog of a job: a thread on every rank, which finds out that a rank is gone or does not
// come further, says so once for the whole job, and ends it.
//
// Every rank sends its progress to rank 0, and rank 0 its own to all (rank_star.h), once a second
// or more often. Rank 0 judges all ranks (rank_judge.h), the others judge rank 0:
//
//   a connection ends without a goodbye   that rank is gone: told at once
//   no message for the limit              its process is stopped, or its host or the way to it is
//   lost no progress for the limit             the ranks that have come least far hang
//
// One rank speaks: rank 0, and where rank 0 is gone, the lowest rank that is left. The watch's own
// thread says it and ends the process, for the main thread may hang. A rank whose main thread meets
// an error hands it to its watch (Fail), which brings it to the rank that speaks: what follows from
// another rank's end (an Aborted status) waits a little for the better cause.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "parallel/communicator.h"
#include "parallel/process_fate.h"
#include "parallel/rank_judge.h"
#include "parallel/rank_links.h"
#include "parallel/rank_star.h"

namespace lockstep {

struct RankWatchOptions {
  std::chrono::duration<double> limit = std::chrono::seconds(60);
  std::chrono::duration<double> connect_limit = std::chrono::seconds(10);
  // The process that started this one is a launcher: the job ends with it.
  bool has_launcher = false;
  // Both are called on the watch's thread, at most once. `report`: this rank speaks for the job.
  // `end`: the job ends; `told`: because another rank has spoken, and will end all of them. After
  // that the watch does nothing more.
  std::function<void(const RankFault& fault)> report;
  std::function<void(const RankFault& fault, bool told)> end;
};

class RankWatch {
 public:
  // COLLECTIVE. `watched` outlives the watch. Errors are the same on all ranks: those of
  // RankStar::Connect, or ResourceExhausted where there is no thread to be had.
  static absl::StatusOr<std::unique_ptr<RankWatch>> Create(Communicator& communicator,
                                                           WatchedRank& watched,
                                                           RankWatchOptions options);
  // Says goodbye: this rank's end is none that others need to hear of.
  ~RankWatch();
  RankWatch(const RankWatch&) = delete;
  RankWatch& operator=(const RankWatch&) = delete;

  // This rank's work has failed: the job ends. From any thread, which should then do nothing more:
  // the watch's thread reports and ends.
  void Fail(const absl::Status& status);
  // The launcher has asked this process to end, and will kill it soon. With `ends`, this rank ends
  // when no cause shows before. Safe in a signal's handler.
  void LauncherEnds(bool ends);

 private:
  using Clock = std::chrono::steady_clock;

  // Why the job will end at `at`, unless a better cause shows before.
  struct Cause {
    RankFault fault;
    bool follows = false;  // perhaps from another one
    bool told = false;
    Clock::time_point at;
  };

  RankWatch(Communicator& communicator, WatchedRank& watched, RankWatchOptions options,
            std::vector<RankName> names, std::vector<ProcessIdentity> processes);

  void Run();
  void Tick(Clock::time_point now);
  void Hear(const StarNews& news, Clock::time_point now);
  void HearMessage(int peer, const StarMessage& message, Clock::time_point now);
  void HearEnd(int peer, Clock::time_point now);
  void TakeOwn(Clock::time_point now);
  void CheckLauncher(Clock::time_point now);
  void Propose(RankFault fault, Clock::duration delay, bool follows, Clock::time_point now);
  void Act();
  bool LauncherIsGone() const;
  std::string MyFaultText(const std::string& what) const;

  const int rank_;
  const int size_;
  WatchedRank& watched_;
  const RankWatchOptions options_;
  const Clock::duration interval_;
  const std::vector<ProcessIdentity> processes_;  // by rank
  const Clock::duration my_turn_;  // where rank 0 cannot speak, the others do so by turns
  const int64_t launcher_pid_;
  RankJudge judge_;
  std::unique_ptr<RankStar> star_;
  std::vector<bool> left_;  // by rank: it has said goodbye
  std::optional<Cause> cause_;
  int launcher_fd_ = -1;  // readable when the launcher is gone; -1: unknown
  int wake_fd_ = -1;

  std::atomic<bool> stopping_ = false;
  std::atomic<bool> launcher_ends_ = false;
  std::atomic<bool> launcher_ends_this_ = false;
  std::optional<Clock::time_point> launcher_ended_at_;  // the thread's own: when it was told
  std::mutex mutex_;
  std::optional<absl::Status> failed_;  // by Fail; taken by the thread

  std::thread thread_;  // the last: it uses the others
};

}  // namespace lockstep
