#include "launch/job_watch.h"

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <thread>

#include "parallel/mpi_communicator.h"

namespace lockstep {

namespace {

// From the report on, before this process ends itself if nothing else has. Those that were told of
// the end leave the time to the rank that speaks, which has to tell its clients.
constexpr unsigned kLastSeconds = 3, kLastSecondsWhenTold = 4;

// The one whose process this is; for the signal's handler.
std::atomic<RankWatch*> watch_of_process = nullptr;

// mpirun ends the ranks because one of them has died, or because it was asked to. The watch finds
// out which, within the second that mpirun leaves.
void OnTerminate(int number, siginfo_t* info, void*) {
  RankWatch* const watch = watch_of_process;
  if (watch != nullptr && info->si_pid == getppid()) return watch->LauncherEnds(/*ends=*/true);
  std::signal(number, SIG_DFL);
  std::raise(number);  // comes when this handler returns
}

// The same where the command ignores the signal.
void NoteTerminate(int, siginfo_t* info, void*) {
  if (info->si_pid == getppid()) JobWatch::LauncherEnds();
}

// Where the command itself has no use for the signal.
void WaitForCauseOnTerminate() {
  struct sigaction current = {};
  sigset_t blocked;
  sigemptyset(&blocked);
  pthread_sigmask(SIG_SETMASK, nullptr, &blocked);
  sigaction(SIGTERM, nullptr, &current);
  const bool ignored = current.sa_handler == SIG_IGN;
  if (sigismember(&blocked, SIGTERM) != 0 || (current.sa_handler != SIG_DFL && !ignored)) return;
  struct sigaction action = {};
  action.sa_sigaction = ignored ? NoteTerminate : OnTerminate;
  action.sa_flags = SA_SIGINFO | SA_RESTART;
  sigaction(SIGTERM, &action, nullptr);
}

void EndWithin(unsigned seconds) {
  std::signal(SIGALRM, [](int) { _exit(1); });
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGALRM);
  pthread_sigmask(SIG_UNBLOCK, &set, nullptr);
  alarm(seconds);
}

void EndBy(int number) {
  std::signal(number, SIG_DFL);
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, number);
  pthread_sigmask(SIG_UNBLOCK, &set, nullptr);
  std::raise(number);
  _exit(128 + number);
}

// What Open MPI keeps in /dev/shm for this job, and mpirun would remove: it is gone.
void RemoveSharedSegments() {
  const std::string prefix = "/dev/shm/vader_segment.";
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    const size_t at = line.find(prefix);
    if (at != std::string::npos) unlink(line.c_str() + at);
  }
}

[[noreturn]] void Sleep() {
  while (true) pause();
}

void PrintError(const std::string& text) {
  std::string line = text;
  for (char& c : line) {
    if (static_cast<unsigned char>(c) < 0x20) c = ' ';  // one line
  }
  std::fprintf(stderr, "lockstep error: %s\n", line.c_str());
}

}  // namespace

absl::Status JobWatch::Start(Communicator& communicator, double seconds) {
  if (seconds <= 0) return absl::OkStatus();
  RankWatchOptions options;
  options.limit = std::chrono::duration<double>(seconds);
  options.has_launcher = StartedByLauncher();
  options.report = [this](const RankFault& fault) { Report(fault); };
  options.end = [this](const RankFault& fault, bool told) { End(fault, told); };
  LOCKSTEP_ASSIGN_OR_RETURN(watch_, RankWatch::Create(communicator, watched_, std::move(options)));
  watch_of_process = watch_.get();
  if (StartedByLauncher()) WaitForCauseOnTerminate();
  start_watch_.Stop();
  return absl::OkStatus();
}

void JobWatch::LauncherEnds() {
  RankWatch* const watch = watch_of_process;
  if (watch != nullptr) watch->LauncherEnds(/*ends=*/false);
}

void JobWatch::Stop() {
  watch_of_process = nullptr;
  watch_.reset();
}

void JobWatch::Report(const RankFault& fault) { PrintError(fault.text); }

void JobWatch::End(const RankFault& fault, bool told) {
  EndWithin(told ? kLastSecondsWhenTold : kLastSeconds);
  if (told) std::signal(SIGTERM, SIG_DFL);  // what the launcher ends the other ranks with
  if (on_failure_) on_failure_(absl::AbortedError(fault.text));
  if (told) {
    watched_.links.AbortNccl();
    Sleep();
  }
  switch (fault.kind) {
    case FaultKind::kLauncherGone:  // who would pass the abort on
      RemoveSharedSegments();
      _exit(1);
    case FaultKind::kLauncherEnds:
      EndBy(SIGTERM);
      _exit(1);
    default:
      watched_.links.AbortNccl();
      AbortJob(1);
  }
}

void JobWatch::Fail(const Communicator& communicator, const absl::Status& status) {
  if (watch_ != nullptr) {
    watch_->Fail(status);
    Sleep();
  }
  if (on_failure_) on_failure_(status);
  // Where ranks learn of it together (another rank is gone; a check found the ranks apart), the
  // lowest one speaks; its abort ends the others while they wait here.
  std::this_thread::sleep_for(std::chrono::milliseconds(20) * communicator.rank());
  const std::string message(status.message());
  PrintError(communicator.size() == 1 ? message
                                      : absl::StrFormat("rank %d (%s): %s", communicator.rank(),
                                                        communicator.host(), message));
  AbortJob(1);
}

}  // namespace lockstep
