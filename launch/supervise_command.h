// `lockstep supervise`: starts a server's ranks again when they have failed.
//
// It stands outside of mpirun, which ends a whole job when a rank dies, and knows the server by two
// things: the exit status of the command (2: refused, which a restart would not change; 0: done;
// any other: failed) and the port that rank 0 takes from it (supervise/port_handover.h).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace lockstep {

struct SuperviseOptions {
  int64_t max_restarts = 3;          // in a row; see supervise/restart_policy.h
  std::vector<std::string> command;  // "mpirun", "-np", "2", "lockstep", "serve", ...
};

// Exit status: that of the command's last run. Ends by the signal that asked for it when no server
// was ready then.
int RunSupervise(const SuperviseOptions& options);

}  // namespace lockstep
