// The processes of a job: the command that starts the ranks, and all that it has started on this
// host, whatever becomes of it.
//
// This process becomes the reaper of all its descendants (PR_SET_CHILD_SUBREAPER): ranks whose
// mpirun has died are its children from then on, so that it knows when the last one is gone, and
// can end those that stay. mpirun puts ranks into process groups of their own; a group would not
// do. Ranks on other hosts are mpirun's affair (or Slurm's).
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

#include "launch/http/http_listener.h"
#include "runtime/core/status.h"

namespace lockstep {

// Used by one thread, the program's first: it must outlive the job, which is told when that thread
// ends. At most one a process, which has no other children.
class JobProcesses {
 public:
  // SIGCHLD waits for Reap from now on.
  static absl::StatusOr<JobProcesses> Create();

  // Starts the command: in a process group of its own, which a Ctrl-C at the terminal does not
  // reach, without input, and with SIGTERM sent to it when this process dies, however it dies. Only
  // when all_gone. FailedPrecondition when it cannot be started.
  absl::Status Start(const std::vector<std::string>& command);

  // Readable when a process has ended: then Reap.
  int fd() const { return ended_.get(); }
  void Reap();

  bool all_gone() const { return all_gone_; }
  // waitpid's status of the command, once it has ended.
  const std::optional<int>& wait_status() const { return wait_status_; }

  // To the command; nothing when it has ended.
  void Signal(int number) const;
  // SIGKILL to the command and to all whose parent has gone; call it again until all_gone. The
  // process ids, for a message.
  std::vector<pid_t> Kill() const;

 private:
  explicit JobProcesses(OwnedFd ended) : ended_(std::move(ended)) {}

  OwnedFd ended_;  // a signalfd
  pid_t command_ = -1;
  bool all_gone_ = true;
  std::optional<int> wait_status_;
};

}  // namespace lockstep
