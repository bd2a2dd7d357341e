// The collectives through MPI: what ranks of several hosts use. Sums are added in rank order, so
// the bits are those of SharedCollectives.
//
// Every operation is started without blocking and then waited for politely: MPI's own waiting burns
// a core however long it takes.
#pragma once

#include <mpi.h>

#include <cstdint>
#include <span>
#include <vector>

#include "runtime/core/status.h"

namespace lockstep {

// Methods are those of Communicator (communicator.h), with its rules.
class MpiCollectives {
 public:
  // `comm` outlives this object and returns errors instead of aborting. MPI counts are ints, so
  // longer messages go in pieces of `max_message_bytes` (4 to 2^30; a test sets it low).
  MpiCollectives(MPI_Comm comm, int rank, int size, int64_t max_message_bytes = int64_t{1} << 30)
      : comm_(comm), rank_(rank), size_(size), max_message_bytes_(max_message_bytes) {}

  absl::Status AllReduceSum(float* data, int64_t count);
  absl::Status AllGatherV(const void* send, std::span<const int64_t> bytes_per_rank, void* recv);
  absl::Status GatherV(const void* send, std::span<const int64_t> bytes_per_rank, void* recv,
                       int root);
  absl::Status Broadcast(void* data, int64_t bytes, int root);
  absl::Status Barrier();

 private:
  absl::Status SumWhole(float* data, int count);
  absl::Status SumInParts(float* data, int count);

  const MPI_Comm comm_;
  const int rank_;
  const int size_;
  const int64_t max_message_bytes_;
  std::vector<float> gathered_;  // [N, count] of the sum in progress
};

}  // namespace lockstep
