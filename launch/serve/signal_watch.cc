#include "launch/serve/signal_watch.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace lockstep {

namespace {

constexpr int kStopSignals[] = {SIGTERM, SIGINT, SIGUSR1, SIGUSR2};

sigset_t StopSignals() {
  sigset_t set;
  sigemptyset(&set);
  for (const int number : kStopSignals) sigaddset(&set, number);
  return set;
}

}  // namespace

absl::StatusOr<SignalWatch> SignalWatch::Create() {
  const sigset_t set = StopSignals();
  pthread_sigmask(SIG_BLOCK, &set, nullptr);
  const int signals = signalfd(-1, &set, SFD_CLOEXEC);
  const int wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (signals >= 0 && wake >= 0) return SignalWatch(signals, wake);
  const std::string why = std::strerror(errno);
  if (signals >= 0) close(signals);
  return absl::ResourceExhaustedError("watching for signals: " + why);
}

void SignalWatch::Ignore() {
  for (const int number : kStopSignals) std::signal(number, SIG_IGN);
}

SignalWatch::SignalWatch(SignalWatch&& other) noexcept
    : signals_(std::exchange(other.signals_, -1)), wake_(std::exchange(other.wake_, -1)) {}

SignalWatch::~SignalWatch() {
  if (signals_ >= 0) close(signals_);
  if (wake_ >= 0) close(wake_);
}

std::optional<StopSignal> SignalWatch::Wait(double seconds) {
  pollfd fds[] = {{.fd = signals_, .events = POLLIN, .revents = 0},
                  {.fd = wake_, .events = POLLIN, .revents = 0}};
  const int milliseconds = seconds < 0 ? -1 : static_cast<int>(seconds * 1000);
  if (poll(fds, 2, milliseconds) <= 0) return std::nullopt;
  uint64_t count;
  if (fds[1].revents != 0 && read(wake_, &count, sizeof(count)) > 0) return std::nullopt;
  signalfd_siginfo info = {};
  if (read(signals_, &info, sizeof(info)) != sizeof(info)) return std::nullopt;
  return StopSignal{static_cast<int>(info.ssi_signo),
                    static_cast<pid_t>(info.ssi_pid) == getppid()};
}

void SignalWatch::Wake() {
  const uint64_t one = 1;
  // Fails when it has been woken 2^64 times already.
  if (write(wake_, &one, sizeof(one)) < 0) return;
}

void SignalWatch::EndBy(int signal_number) {
  std::signal(signal_number, SIG_DFL);
  const sigset_t set = StopSignals();
  pthread_sigmask(SIG_UNBLOCK, &set, nullptr);
  raise(signal_number);
  std::_Exit(128 + signal_number);
}

}  // namespace lockstep
