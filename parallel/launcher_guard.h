// The end of mpirun and its daemons where a job fails and a host is out of reach. Open MPI's
// launcher then waits until each daemon has said that its ranks are gone, and a daemon until mpirun
// has heard it: for as long as TCP tries to reach the other host, a quarter of an hour on Linux.
#pragma once

#include <chrono>

namespace lockstep {

// Leaves a process behind that kills this rank's launcher (an ancestor: mpirun or orted, prterun or
// prted in Open MPI 5) when it is still there after `patience`. It holds nothing open, belongs to
// another process group, which the launcher does not end, and goes with the launcher.
//
// For a rank that is about to end the job, from any thread. Does nothing without such an ancestor
// (srun), and where the system has no pidfd (before Linux 5.3).
void KillLauncherLater(std::chrono::milliseconds patience);

}  // namespace lockstep
