#include "parallel/rank_watch.h"

#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

namespace lockstep {

namespace {

using std::chrono::milliseconds;

enum MessageKind : uint32_t {
  kProgress = 1,   // a ProgressRecord
  kGoodbye,        // the sender ends as it should
  kOwnFault,       // to rank 0: the sender's own error, as a line
  kFollowedFault,  // the same; it may follow from another rank's end
  kEnd,            // the sender has reported and ends the job
};

// For the cause of an error that may follow from another one.
constexpr milliseconds kCauseDelay(300);
// The same where the launcher ends this rank, which it kills a second later. Rank 0 speaks first.
constexpr milliseconds kLauncherDelay(300), kLauncherDelayOfOthers(600);
// Rank 0 has been told of this rank's error; if it has not ended the job by then, this rank does.
constexpr milliseconds kRank0Delay(2000);
// Where rank 0 is gone the others speak by turns. When one has, the launcher ends the rest, for
// which mpirun takes a second where they ignore its SIGTERM.
constexpr milliseconds kTurn(1200), kLastTurn(3600);

struct WireName {
  char host[256];
  ProcessIdentity process;
};

absl::StatusOr<std::vector<WireName>> GatherNames(Communicator& communicator) {
  WireName mine = {};
  const std::string host = communicator.host();
  std::memcpy(mine.host, host.data(), std::min(host.size(), sizeof(mine.host) - 1));
  mine.process = ThisProcess();
  std::vector<WireName> all(static_cast<size_t>(communicator.size()));
  LOCKSTEP_RETURN_IF_ERROR(communicator.AllGather(&mine, sizeof(mine), all.data()));
  return all;
}

// When a rank speaks in the place of rank 0: first the lowest one, then the first of each other
// host, for all of rank 0's host may be gone, then the rest.
milliseconds TurnOf(int rank, const std::vector<RankName>& names) {
  std::vector<std::string> hosts = {names[0].host};
  int turn = 0;
  for (int r = 1; r <= rank; ++r) {
    const std::string& host = names[static_cast<size_t>(r)].host;
    const bool is_first = std::find(hosts.begin(), hosts.end(), host) == hosts.end();
    if (is_first) hosts.push_back(host);
    if (r == rank && !is_first && rank != 1) return kLastTurn;
    if (r < rank && (is_first || r == 1)) ++turn;
  }
  return std::min(turn * kTurn, kLastTurn);
}

// -1 on kernels before 5.3.
int OpenProcess(int64_t pid) { return static_cast<int>(syscall(SYS_pidfd_open, pid, 0)); }

}  // namespace

absl::StatusOr<std::unique_ptr<RankWatch>> RankWatch::Create(Communicator& communicator,
                                                             WatchedRank& watched,
                                                             RankWatchOptions options) {
  LOCKSTEP_CHECK(options.limit.count() > 0 && options.report && options.end);
  LOCKSTEP_ASSIGN_OR_RETURN(const std::vector<WireName> wire, GatherNames(communicator));
  std::vector<RankName> names;
  std::vector<ProcessIdentity> processes;
  for (const WireName& one : wire) {
    names.push_back({one.host, one.process.pid});
    processes.push_back(one.process);
  }
  std::unique_ptr<RankWatch> watch(new RankWatch(communicator, watched, std::move(options),
                                                 std::move(names), std::move(processes)));
  LOCKSTEP_ASSIGN_OR_RETURN(watch->star_,
                            RankStar::Connect(communicator, watch->options_.connect_limit));
  LOCKSTEP_RETURN_IF_ERROR(
      Agree(communicator, CatchExhaustion("starting the watchdog", [&]() -> absl::Status {
              if (watch->wake_fd_ < 0) {
                return absl::ResourceExhaustedError(std::strerror(errno));
              }
              watch->thread_ = std::thread([watch = watch.get()] { watch->Run(); });
              return absl::OkStatus();
            })));
  return watch;
}

RankWatch::RankWatch(Communicator& communicator, WatchedRank& watched, RankWatchOptions options,
                     std::vector<RankName> names, std::vector<ProcessIdentity> processes)
    : rank_(communicator.rank()),
      size_(communicator.size()),
      watched_(watched),
      options_(std::move(options)),
      interval_(std::chrono::duration_cast<Clock::duration>(
          std::min<std::chrono::duration<double>>(std::chrono::seconds(1), options_.limit / 4))),
      processes_(std::move(processes)),
      my_turn_(TurnOf(rank_, names)),
      launcher_pid_(getppid()),
      judge_(std::move(names), options_.limit, /*judges_progress=*/communicator.rank() == 0),
      left_(static_cast<size_t>(size_), false),
      launcher_fd_(options_.has_launcher ? OpenProcess(launcher_pid_) : -1),
      wake_fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}

RankWatch::~RankWatch() {
  stopping_ = true;
  if (wake_fd_ >= 0) eventfd_write(wake_fd_, 1);
  if (thread_.joinable()) thread_.join();
  if (wake_fd_ >= 0) close(wake_fd_);
  if (launcher_fd_ >= 0) close(launcher_fd_);
}

void RankWatch::Fail(const absl::Status& status) {
  {
    const std::lock_guard lock(mutex_);
    if (!failed_.has_value()) failed_ = status;
  }
  eventfd_write(wake_fd_, 1);
}

void RankWatch::LauncherEnds(bool ends) {
  launcher_ends_this_ = ends;
  launcher_ends_ = true;
  const uint64_t one = 1;
  if (write(wake_fd_, &one, sizeof(one)) < 0) return;  // it has been woken 2^64 times already
}

void RankWatch::Run() {
  Clock::time_point now = Clock::now();
  Clock::time_point next_tick = now;
  judge_.Hear(rank_, watched_.progress.Read(), now);
  for (const int peer : star_->Peers()) judge_.Hear(peer, {}, now);
  while (!cause_.has_value() || now < cause_->at) {
    const Clock::time_point wake = cause_.has_value() ? std::min(next_tick, cause_->at) : next_tick;
    std::array<pollfd, 2> others = {{{.fd = wake_fd_, .events = POLLIN, .revents = 0},
                                     {.fd = launcher_fd_, .events = POLLIN, .revents = 0}}};
    const std::vector<StarNews> news = star_->Poll(wake - now, others);
    now = Clock::now();
    // This process or its host stood still: what others have sent meanwhile comes late, too.
    if (now - wake > std::max<Clock::duration>(interval_, std::chrono::seconds(1))) {
      judge_.StartAnew(now);
    }
    if (stopping_) {
      for (const int peer : star_->Peers()) star_->Send(peer, kGoodbye, "");
      return;
    }
    eventfd_t count;
    if (others[0].revents != 0) eventfd_read(wake_fd_, &count);
    if (others[1].revents != 0) CheckLauncher(now);
    TakeOwn(now);
    for (const StarNews& one : news) Hear(one, now);
    if (now >= next_tick) {
      Tick(now);
      next_tick = now + interval_;
    }
  }
  Act();
}

void RankWatch::Tick(Clock::time_point now) {
  const ProgressRecord mine = watched_.progress.Read();
  judge_.Hear(rank_, mine, now);
  for (const int peer : star_->Peers()) {
    star_->Send(peer, kProgress, {reinterpret_cast<const char*>(&mine), sizeof(mine)});
  }
  CheckLauncher(now);
  if (const absl::Status nccl = watched_.links.AsyncError(); !nccl.ok()) {
    Fail(absl::AbortedError(nccl.message()));  // of another rank's end, mostly
    TakeOwn(now);
  }
  if (cause_.has_value()) return;
  std::optional<RankFault> fault = judge_.Judge(now);
  if (!fault.has_value()) return;
  const ProcessIdentity& process = processes_[static_cast<size_t>(fault->rank)];
  if (fault->kind == FaultKind::kSilent && IsStopped(process)) {
    absl::StrAppend(&fault->text, "; its process ", process.pid, " is stopped");
  }
  Propose(*std::move(fault), my_turn_, /*follows=*/false, now);
}

void RankWatch::Hear(const StarNews& news, Clock::time_point now) {
  for (const StarMessage& message : news.messages) HearMessage(news.peer, message, now);
  if (news.closed) HearEnd(news.peer, now);
}

void RankWatch::HearMessage(int peer, const StarMessage& message, Clock::time_point now) {
  switch (message.kind) {
    case kProgress: {
      ProgressRecord record;
      if (message.body.size() != sizeof(record)) return;
      std::memcpy(&record, message.body.data(), sizeof(record));
      return judge_.Hear(peer, record, now);
    }
    case kGoodbye:
      left_[static_cast<size_t>(peer)] = true;
      return judge_.Leave(peer);
    case kOwnFault:
    case kFollowedFault: {
      const bool follows = message.kind == kFollowedFault;
      return Propose({FaultKind::kError, peer, message.body},
                     follows ? Clock::duration(kCauseDelay) : Clock::duration(0), follows, now);
    }
    case kEnd:
      cause_ = {.fault = {FaultKind::kError, peer, message.body},
                .follows = false,
                .told = true,
                .at = now};
      return;
    default:
      return;
  }
}

// What is known about a connection that has ended.
void RankWatch::HearEnd(int peer, Clock::time_point now) {
  if (left_[static_cast<size_t>(peer)]) return;
  judge_.Hear(rank_, watched_.progress.Read(), now);
  judge_.Leave(peer);
  CheckLauncher(now);
  const ProcessIdentity& process = processes_[static_cast<size_t>(peer)];
  const RankName& name = judge_.name(peer);
  const std::string how = name.host == judge_.name(rank_).host ? HowItEnded(process) : "";
  // Those that the launcher ends are no cause: it asks, and kills what is left a second later.
  if (launcher_ended_at_.has_value()) {
    const bool later = now - *launcher_ended_at_ > kLauncherDelayOfOthers;
    if (how.ends_with("SIGTERM") || (later && (how.empty() || how.ends_with("SIGKILL")))) return;
  }
  const std::string what =
      how.empty()
          ? absl::StrFormat("its process %d has ended, or the connection to it", process.pid)
          : absl::StrFormat("its process %d %s", process.pid, how);
  Propose({FaultKind::kEnded, peer, FaultText(peer, name, judge_.furthest(), what)}, my_turn_,
          /*follows=*/false, now);
}

// What other threads of this process have said.
void RankWatch::TakeOwn(Clock::time_point now) {
  if (launcher_ends_ && !launcher_ended_at_.has_value()) launcher_ended_at_ = now;
  if (launcher_ends_this_.exchange(false)) {
    Propose({FaultKind::kLauncherEnds, rank_, MyFaultText("the launcher ends the job (SIGTERM)")},
            rank_ == 0 ? kLauncherDelay : kLauncherDelayOfOthers, /*follows=*/true, now);
  }
  std::optional<absl::Status> failed;
  {
    const std::lock_guard lock(mutex_);
    failed.swap(failed_);
  }
  if (!failed.has_value()) return;
  const bool follows = absl::IsAborted(*failed);
  RankFault fault{
      FaultKind::kError, rank_,
      MyFaultText(std::string(failed->message()).substr(0, RankStar::kMaxBodyBytes / 2))};
  if (rank_ == 0) {
    return Propose(std::move(fault), follows ? Clock::duration(kCauseDelay) : Clock::duration(0),
                   follows, now);
  }
  star_->Send(0, follows ? kFollowedFault : kOwnFault, fault.text);
  Propose(std::move(fault), kRank0Delay, /*follows=*/true, now);
}

void RankWatch::CheckLauncher(Clock::time_point now) {
  if (!LauncherIsGone()) return;
  cause_.reset();  // nothing else is a cause then
  Propose({FaultKind::kLauncherGone, rank_,
           MyFaultText(absl::StrFormat("the launcher, process %d, is gone", launcher_pid_))},
          Clock::duration(0), /*follows=*/false, now);
}

bool RankWatch::LauncherIsGone() const {
  return options_.has_launcher && getppid() != launcher_pid_;
}

std::string RankWatch::MyFaultText(const std::string& what) const {
  const ProgressRecord record = watched_.progress.Read();
  if (size_ == 1) return absl::StrCat(PhaseText(record), ": ", what);
  return FaultText(rank_, judge_.name(rank_), record, what);
}

// The first cause counts, but for one that may follow from another.
void RankWatch::Propose(RankFault fault, Clock::duration delay, bool follows,
                        Clock::time_point now) {
  if (cause_.has_value() && (follows || !cause_->follows)) return;
  cause_ = {.fault = std::move(fault), .follows = follows, .told = false, .at = now + delay};
}

void RankWatch::Act() {
  const Cause& cause = *cause_;
  // Every rank sees by itself what the launcher does.
  const bool by_launcher =
      cause.fault.kind == FaultKind::kLauncherGone || cause.fault.kind == FaultKind::kLauncherEnds;
  const bool speaks = !cause.told && (rank_ == 0 || !by_launcher);
  if (speaks) options_.report(cause.fault);
  if (speaks && !by_launcher) {
    // A peer that stands still reads it when the launcher wakes it up in order to end it.
    for (const int peer : star_->Peers()) star_->Send(peer, kEnd, cause.fault.text);
  }
  watched_.links.Stop();
  options_.end(cause.fault, cause.told);
}

}  // namespace lockstep
