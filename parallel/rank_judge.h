// Which rank of a job does not come further: a function of what the ranks have said and when, apart
// from threads, sockets and clocks.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "parallel/rank_progress.h"

namespace lockstep {

// What the ranks call each other.
struct RankName {
  std::string host;
  int64_t pid = 0;
};

enum class FaultKind {
  kEnded,         // its process is no more
  kSilent,        // its process, or the way to it, does not answer
  kStuck,         // it answers, but does not come further
  kError,         // it has met an error itself
  kLauncherGone,  // what started the ranks is no more
  kLauncherEnds,  // what started the ranks ends them
};

struct RankFault {
  FaultKind kind = FaultKind::kError;
  int rank = 0;      // the first one that is at fault
  std::string text;  // one line: which rank, on which host, in which step, and what is wrong
};

// "rank 1 (host b) in step 57 (decode): WHAT".
std::string FaultText(int rank, const RankName& name, const ProgressRecord& record,
                      const std::string& what);

// Not thread-safe.
class RankJudge {
 public:
  using Time = std::chrono::steady_clock::time_point;

  // names: of all ranks. Of ranks that were never heard of nothing is expected. Progress is judged
  // by who hears of all ranks; without `judges_progress` only silence is.
  RankJudge(std::vector<RankName> names, std::chrono::duration<double> limit, bool judges_progress);

  // From the first of these calls on, the rank is expected to be heard of.
  void Hear(int rank, const ProgressRecord& record, Time now);
  // It has said goodbye: nothing more is expected of it.
  void Leave(int rank);
  // All clocks begin anew: nobody could be heard of for a while, because of the listener.
  void StartAnew(Time now);

  // A rank that was not heard of for `limit`; else the ranks that have come least far in the order
  // of collectives, when nothing has changed about them for `limit` and none of them is paused.
  std::optional<RankFault> Judge(Time now) const;

  // Of the rank that has come furthest. What a rank has said last may be a second old, and the step
  // of those that wait for it is the one that it was in.
  const ProgressRecord& furthest() const;
  const ProgressRecord& record(int rank) const { return ranks_[static_cast<size_t>(rank)].record; }
  const RankName& name(int rank) const { return names_[static_cast<size_t>(rank)]; }

 private:
  struct Rank {
    bool expected = false;
    ProgressRecord record;
    Time heard;
  };

  // Those that have passed the fewest collectives.
  std::vector<int> Slowest() const;
  std::optional<RankFault> JudgeSilence(Time now) const;
  std::string StuckText(const std::vector<int>& slowest, double seconds) const;

  const std::vector<RankName> names_;
  const std::chrono::duration<double> limit_;
  const bool judges_progress_;
  std::vector<Rank> ranks_;
  // What stood still since `still_since_`: the slowest ranks and their records.
  std::vector<int> slowest_;
  Time still_since_;
};

}  // namespace lockstep
