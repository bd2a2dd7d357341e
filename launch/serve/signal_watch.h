// Signals that ask a server or a batch job to stop, told to a thread instead of a handler.
#pragma once

#include <optional>

#include "runtime/core/status.h"

namespace lockstep {

struct StopSignal {
  int number = 0;  // SIGTERM, SIGINT, SIGUSR1 or SIGUSR2
  // Sent by the process that started this one. mpirun that is asked to stop sends SIGTERM, and
  // SIGKILL a second later; what it merely passes on are SIGUSR1 and SIGUSR2.
  bool from_parent = false;
};

// Thread rule: one thread makes it, at the start of the program, before any other thread runs;
// then one thread waits, and any may wake it.
class SignalWatch {
 public:
  // From now on these signals end nobody: they wait for Wait.
  static absl::StatusOr<SignalWatch> Create();
  // Where nobody waits: the signals are ignored.
  static void Ignore();

  SignalWatch(SignalWatch&& other) noexcept;
  SignalWatch& operator=(SignalWatch&&) = delete;
  ~SignalWatch();

  // The next signal; none when Wake was called, or after `seconds` (negative: no limit).
  std::optional<StopSignal> Wait(double seconds);
  void Wake();
  // Readable when a signal is there, for who waits for other things as well: then Wait(0) has it.
  int fd() const { return signals_; }

  // Ends the process as the signal would have.
  [[noreturn]] static void EndBy(int signal_number);

 private:
  SignalWatch(int signals, int wake) : signals_(signals), wake_(wake) {}

  int signals_ = -1;  // a signalfd
  int wake_ = -1;     // an eventfd
};

}  // namespace lockstep
