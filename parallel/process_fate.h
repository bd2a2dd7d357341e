// How another process of this host has ended, as far as its parent has not waited for it yet.
#pragma once

#include <cstdint>
#include <string>

namespace lockstep {

// Names a process also after its number was given to another one, and tells when a number is that
// of another host or container.
struct ProcessIdentity {
  int64_t pid = 0;
  uint64_t start_ticks = 0;  // when it started, in clock ticks since the boot; 0: unknown
};

// Of this host.
ProcessIdentity ProcessOf(int64_t pid);
ProcessIdentity ThisProcess();

// "was killed by SIGKILL", "ended with exit status 0"; "" where that cannot be known: another host,
// or its parent was faster.
std::string HowItEnded(const ProcessIdentity& process);
// It is there but was stopped (SIGSTOP, a debugger).
bool IsStopped(const ProcessIdentity& process);

}  // namespace lockstep
