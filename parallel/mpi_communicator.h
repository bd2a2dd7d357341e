// Open MPI processes as ranks.
#pragma once

#include <memory>

#include "parallel/communicator.h"

namespace lockstep {

// COLLECTIVE over all processes of the job. Initialises MPI (MPI_THREAD_SERIALIZED); the destructor
// of the last owner finalises it. Call once a process. A program started without mpirun is a job of
// one rank. Small sums between ranks of one host go through shared memory, others through MPI.
absl::StatusOr<std::unique_ptr<Communicator>> CreateMpiCommunicator();

// Ends the whole job at once, from any thread: for errors after work started, where other ranks may
// be inside a collective. exit_status must be 1..255.
[[noreturn]] void AbortJob(int exit_status);

}  // namespace lockstep
