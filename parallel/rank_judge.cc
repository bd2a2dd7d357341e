#include "parallel/rank_judge.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "absl/strings/str_join.h"
#include "runtime/core/status.h"

namespace lockstep {

namespace {

// How far a rank has come: comparable between ranks, for all enter the same collectives.
std::pair<int64_t, int64_t> Place(const ProgressRecord& record) {
  return {record.entered, record.passed};
}

double Seconds(RankJudge::Time::duration duration) {
  return std::chrono::duration<double>(duration).count();
}

std::string RankList(const std::vector<int>& ranks) {
  return absl::StrCat(ranks.size() == 1 ? "rank " : "ranks ", absl::StrJoin(ranks, ", "));
}

}  // namespace

std::string FaultText(int rank, const RankName& name, const ProgressRecord& record,
                      const std::string& what) {
  return absl::StrFormat("rank %d (%s) %s: %s", rank, name.host, PhaseText(record), what);
}

RankJudge::RankJudge(std::vector<RankName> names, std::chrono::duration<double> limit,
                     bool judges_progress)
    : names_(std::move(names)),
      limit_(limit),
      judges_progress_(judges_progress),
      ranks_(names_.size()) {}

void RankJudge::Hear(int rank, const ProgressRecord& record, Time now) {
  Rank& heard = ranks_[static_cast<size_t>(rank)];
  const bool changed = !heard.expected || heard.record != record;
  const bool was_slowest = std::find(slowest_.begin(), slowest_.end(), rank) != slowest_.end();
  heard.expected = true;
  heard.record = record;
  heard.heard = now;
  // A rank that only waited for the slowest has a whole limit from when these have moved.
  std::vector<int> slowest = Slowest();
  if (slowest != slowest_ || (was_slowest && changed)) still_since_ = now;
  slowest_ = std::move(slowest);
}

void RankJudge::Leave(int rank) {
  ranks_[static_cast<size_t>(rank)].expected = false;
  slowest_ = Slowest();
}

void RankJudge::StartAnew(Time now) {
  for (Rank& rank : ranks_) rank.heard = now;
  still_since_ = now;
}

const ProgressRecord& RankJudge::furthest() const {
  return std::max_element(
             ranks_.begin(), ranks_.end(),
             [](const Rank& a, const Rank& b) { return Place(a.record) < Place(b.record); })
      ->record;
}

std::vector<int> RankJudge::Slowest() const {
  std::vector<int> slowest;
  for (size_t r = 0; r < ranks_.size(); ++r) {
    if (!ranks_[r].expected) continue;
    if (!slowest.empty()) {
      const auto best = Place(record(slowest[0])), mine = Place(ranks_[r].record);
      if (mine > best) continue;
      if (mine < best) slowest.clear();
    }
    slowest.push_back(static_cast<int>(r));
  }
  return slowest;
}

std::optional<RankFault> RankJudge::Judge(Time now) const {
  if (auto silent = JudgeSilence(now); silent.has_value()) return silent;
  if (!judges_progress_ || slowest_.empty() || now - still_since_ < limit_) return std::nullopt;
  for (const int rank : slowest_) {
    if (record(rank).paused != 0) return std::nullopt;
    // It may be about to become silent, which says more.
    if (now - ranks_[static_cast<size_t>(rank)].heard >= limit_ / 2) return std::nullopt;
  }
  return RankFault{FaultKind::kStuck, slowest_[0],
                   StuckText(slowest_, Seconds(now - still_since_))};
}

std::optional<RankFault> RankJudge::JudgeSilence(Time now) const {
  for (size_t r = 0; r < ranks_.size(); ++r) {
    if (!ranks_[r].expected || now - ranks_[r].heard < limit_) continue;
    const int rank = static_cast<int>(r);
    return RankFault{FaultKind::kSilent, rank,
                     FaultText(rank, names_[r], furthest(),
                               absl::StrFormat("it has not answered for %.1f s",
                                               Seconds(now - ranks_[r].heard)))};
  }
  return std::nullopt;
}

std::string RankJudge::StuckText(const std::vector<int>& slowest, double seconds) const {
  std::vector<int> ahead;  // those that wait for the slowest
  for (size_t r = 0; r < ranks_.size(); ++r) {
    const int rank = static_cast<int>(r);
    if (ranks_[r].expected && Place(ranks_[r].record) > Place(record(slowest[0]))) {
      ahead.push_back(rank);
    }
  }
  const int first = slowest[0];
  const ProgressRecord& mine = record(first);
  std::string what = absl::StrFormat("no progress for %.1f s", seconds);
  if (mine.in_collective()) {
    absl::StrAppend(&what, slowest.size() + ahead.size() == 1 ? " in " : "; all ranks wait in ",
                    CollectiveText(mine));
    if (!ahead.empty()) {
      what = absl::StrFormat("no progress for %.1f s; it has not left %s, which %s %s passed",
                             seconds, CollectiveText(mine), RankList(ahead),
                             ahead.size() == 1 ? "has" : "have");
    }
  } else if (!ahead.empty()) {
    // Of the waiting ranks the one that has come least far tells what is next.
    const int next = *std::min_element(ahead.begin(), ahead.end(), [&](int a, int b) {
      return Place(record(a)) < Place(record(b));
    });
    absl::StrAppend(&what, "; it has not reached ", CollectiveText(record(next)), ", in which ",
                    RankList(ahead), ahead.size() == 1 ? " waits" : " wait");
  } else {
    absl::StrAppend(&what, slowest.size() == 1 ? "" : " on any rank", "; ", mine.landed,
                    " steps have landed, the last collective was ", CollectiveText(mine));
  }
  if (slowest.size() > 1) absl::StrAppend(&what, " (so ", RankList(slowest), ")");
  return FaultText(first, names_[static_cast<size_t>(first)], mine, what);
}

}  // namespace lockstep
