#include "launch/supervise_command.h"

#include <poll.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/str_join.h"
#include "launch/engine_session.h"
#include "launch/openai/api_server.h"
#include "launch/serve/signal_watch.h"
#include "launch/supervise/job_processes.h"
#include "launch/supervise/outage_answers.h"
#include "launch/supervise/port_handover.h"
#include "launch/supervise/restart_policy.h"
#include "runtime/core/log.h"

namespace lockstep {

namespace {

using Clock = std::chrono::steady_clock;
constexpr Clock::time_point kNever = Clock::time_point::max();

// Sent twice at once to a process group counts as one.
constexpr std::chrono::milliseconds kOneSignal(250);
// From the second signal until ranks that do not end are ended. They need about two.
constexpr std::chrono::seconds kHasteTime(10);
// For mpirun to end its ranks, and for ranks to end behind it, before they are killed.
constexpr std::chrono::seconds kEndTime(5);
constexpr std::chrono::milliseconds kKillAgain(200);

class Supervisor {
 public:
  Supervisor(const SuperviseOptions& options, SignalWatch signals, JobProcesses job)
      : options_(options),
        signals_(std::move(signals)),
        job_(std::move(job)),
        policy_(options.max_restarts) {}

  absl::Status Open();
  int Run();
  // Ends this process by it.
  std::optional<int> ending_signal() const { return ending_signal_; }

 private:
  absl::Status RunJob();
  // Waits for the next event, or until `time`.
  void Wait(Clock::time_point time);
  void OnSignal(int number);
  void EndLeftovers();
  // True: the job is to be started again, after the pause, which is over.
  bool PauseBeforeRestart(int wait_status);

  const SuperviseOptions& options_;
  SignalWatch signals_;
  JobProcesses job_;
  RestartPolicy policy_;
  OutageAnswers answers_;
  std::unique_ptr<PortKeeper> port_;  // its server uses answers_

  std::optional<Clock::time_point> stop_since_;  // the first signal
  std::optional<int> ending_signal_;             // it came when no server was ready
  Clock::time_point term_at_ = kNever;           // mpirun is to get SIGTERM
  Clock::time_point kill_at_ = kNever;           // what is left is to be killed
  std::vector<pid_t> killed_;                    // last
};

absl::Status Supervisor::Open() {
  LOCKSTEP_ASSIGN_OR_RETURN(port_, PortKeeper::Create(
                                       [this](const std::shared_ptr<HttpExchange>& exchange) {
                                         answers_.Answer(*exchange);
                                       },
                                       OpenAiErrorBody));
  setenv(kSupervisorVariable, port_->name().c_str(), 1);
  return absl::OkStatus();
}

int Supervisor::Run() {
  while (true) {
    if (absl::Status status = RunJob(); !status.ok()) {
      Log(LogLevel::kError, std::string(status.message()));
      return policy_.number() == 0 ? 2 : 1;
    }
    const int wait_status = *job_.wait_status();
    if (stop_since_.has_value() || !PauseBeforeRestart(wait_status)) {
      return ExitStatusOf(wait_status);
    }
  }
}

// Until no process of it is left: the next one needs their memory, and their GPUs.
absl::Status Supervisor::RunJob() {
  term_at_ = kill_at_ = kNever;
  port_->Forget();
  LOCKSTEP_RETURN_IF_ERROR(job_.Start(options_.command));
  while (!job_.all_gone()) {
    if (job_.wait_status().has_value()) kill_at_ = std::min(kill_at_, Clock::now() + kEndTime);
    Wait(std::min(term_at_, kill_at_));
    EndLeftovers();
  }
  return absl::OkStatus();
}

void Supervisor::EndLeftovers() {
  const Clock::time_point now = Clock::now();
  if (now >= term_at_) {
    job_.Signal(SIGTERM);
    term_at_ = kNever;
    kill_at_ = std::min(kill_at_, now + kEndTime);
  }
  if (now < kill_at_ || job_.all_gone()) return;
  std::vector<pid_t> killed = job_.Kill();
  if (killed != killed_ && !killed.empty()) {
    LogWarning("processes that do not end are killed: " + absl::StrJoin(killed, ", "));
  }
  killed_ = std::move(killed);
  kill_at_ = now + kKillAgain;
}

bool Supervisor::PauseBeforeRestart(int wait_status) {
  const int exit_status = ExitStatusOf(wait_status);
  const std::string& command = options_.command[0];
  const std::string end = DescribeEnd(command.substr(command.rfind('/') + 1), wait_status);
  if (exit_status == 0) return false;
  if (exit_status == 2) {
    // The job itself has told why.
    if (policy_.number() > 0) LogWarning("the restarted job was refused (exit status 2): ending");
    return false;
  }
  const std::optional<std::chrono::seconds> pause = policy_.Next(port_->ready_time());
  if (!pause.has_value()) {
    LogWarning(absl::StrFormat("the job has failed (%s); no restart of %d is left: ending", end,
                               options_.max_restarts));
    return false;
  }
  LogWarning(absl::StrFormat("the job has failed (%s); restart %d of %d in %d s", end,
                             policy_.number(), options_.max_restarts, pause->count()));
  const Clock::time_point next_start = Clock::now() + *pause;
  answers_.SetNextStart(next_start);
  while (!stop_since_.has_value() && Clock::now() < next_start) Wait(next_start);
  return !stop_since_.has_value();
}

void Supervisor::Wait(Clock::time_point time) {
  std::array<pollfd, 4> fds = {{{.fd = signals_.fd(), .events = POLLIN, .revents = 0},
                                {.fd = job_.fd(), .events = POLLIN, .revents = 0},
                                {.fd = port_->listener_fd(), .events = POLLIN, .revents = 0},
                                {.fd = port_->lease_fd(), .events = POLLIN, .revents = 0}}};
  int milliseconds = -1;
  if (time != kNever) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(time - Clock::now());
    milliseconds = static_cast<int>(std::clamp<int64_t>(left.count(), 0, 1 << 30));
  }
  if (poll(fds.data(), fds.size(), milliseconds) <= 0) return;
  // The lease first: whether a server is ready decides about the others.
  if (fds[2].revents != 0 || fds[3].revents != 0) port_->OnEvents();
  if (fds[1].revents != 0) job_.Reap();
  if (fds[0].revents == 0) return;
  if (const std::optional<StopSignal> signal = signals_.Wait(0)) OnSignal(signal->number);
}

// A server that is ready is asked by SIGUSR2, which mpirun passes on, to let requests finish; what
// is not yet ready ends at once, and so does what is asked twice.
void Supervisor::OnSignal(int number) {
  const Clock::time_point now = Clock::now();
  if (stop_since_.has_value() && now - *stop_since_ < kOneSignal) return;
  const bool first = !stop_since_.has_value();
  if (first) stop_since_ = now;
  answers_.SetEnding();
  if (first && !port_->is_ready()) {
    LogWarning(absl::StrFormat("SIG%s while no server is ready: ending", sigabbrev_np(number)));
    ending_signal_ = number;
    term_at_ = now;
  } else if (ending_signal_.has_value()) {
    kill_at_ = now;
  } else {
    job_.Signal(SIGUSR2);
    if (!first) term_at_ = std::min(term_at_, now + kHasteTime);
  }
}

// What does not depend on the job.
absl::StatusOr<std::unique_ptr<Supervisor>> MakeSupervisor(const SuperviseOptions& options) {
  if (LaunchedByMpirun()) {
    return absl::FailedPreconditionError(
        "supervise cannot start again the mpirun that it is started by: write lockstep supervise "
        "... -- mpirun ...");
  }
  LOCKSTEP_ASSIGN_OR_RETURN(SignalWatch signals, SignalWatch::Create());
  LOCKSTEP_ASSIGN_OR_RETURN(JobProcesses job, JobProcesses::Create());
  auto supervisor = std::make_unique<Supervisor>(options, std::move(signals), std::move(job));
  LOCKSTEP_RETURN_IF_ERROR(supervisor->Open());
  return supervisor;
}

}  // namespace

int RunSupervise(const SuperviseOptions& options) {
  absl::StatusOr<std::unique_ptr<Supervisor>> supervisor = MakeSupervisor(options);
  if (!supervisor.ok()) {
    Log(LogLevel::kError, std::string(supervisor.status().message()));
    return 2;
  }
  const int exit_status = (*supervisor)->Run();
  const std::optional<int> signal = (*supervisor)->ending_signal();
  supervisor->reset();
  if (signal.has_value()) SignalWatch::EndBy(*signal);
  return exit_status;
}

}  // namespace lockstep
