// Open MPI processes as ranks.
#pragma once

#include <memory>
#include <string_view>

#include "parallel/communicator.h"

namespace lockstep {

// COLLECTIVE over all processes of the job. Call once a process.
//
// Under mpirun or srun --mpi=pmix it initialises MPI (MPI_THREAD_SERIALIZED), and the destructor
// finalises it, unless a collective failed: then the process must end, and the launcher ends the
// job. A program started without a launcher is a job of one rank and does not touch MPI.
//
// A rank that gives up while others go on must call AbortJob: between hosts the others would wait
// for it for ever (on one host they get an Aborted status, as when a rank has died).
//
// Ranks of one host talk through shared memory, ranks of several hosts through MPI; the results are
// the same bits. LOCKSTEP_COLLECTIVES=mpi in the environment makes all use MPI (for tests), auto is
// the default.
//
// Errors, the same on all ranks: InvalidArgument for another value of that variable,
// FailedPrecondition when Slurm or a PMI launcher says that there are several processes, of which
// MPI knows nothing, Internal when MPI fails.
absl::StatusOr<std::unique_ptr<Communicator>> CreateMpiCommunicator();

// What moves the data of a communicator that CreateMpiCommunicator made: "shared memory" or "mpi".
std::string_view TransportOf(const Communicator& communicator);

// Whether mpirun or srun --mpi=pmix started this process. Needs no MPI.
bool StartedByLauncher();

// Ends the whole job at once, from any thread: for errors after work started, where other ranks may
// be inside a collective. exit_status must be 1..255.
[[noreturn]] void AbortJob(int exit_status);

}  // namespace lockstep
