// Collectives between the ranks of one job, over host memory.
//
// Every method marked COLLECTIVE must be called by all ranks, in the same order, with matching
// sizes; none may return early from a sequence that others go on with (see Agree). Thread rule: one
// thread a rank talks to its Communicator. Calls are synchronous: buffers may be reused when they
// return. A failed call leaves the communicator unusable: the job ends.
//
// Order of sums, stated here and nowhere else: partial sums are added in rank order, ((r0 + r1) +
// r2) + ..., in float32, so all ranks hold the same bits.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "runtime/core/status.h"

namespace lockstep {

class Communicator {
 public:
  virtual ~Communicator() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  // Host name of this rank, for messages.
  virtual std::string host() const = 0;
  // Ranks of this job on this rank's host (>= 1), to share out its cores.
  virtual int ranks_on_host() const = 0;
  // The lowest of them: it tells hosts apart whose names are the same.
  virtual int first_rank_on_host() const = 0;

  // COLLECTIVE. In place: data[i] = sum over ranks, the same bits on all. float32 [count].
  virtual absl::Status AllReduceSum(float* data, int64_t count) = 0;
  // COLLECTIVE. Every rank's `bytes` bytes, in rank order, into recv [size() * bytes] on all ranks.
  virtual absl::Status AllGather(const void* send, int64_t bytes, void* recv) = 0;
  // COLLECTIVE. Rank r sends bytes_per_rank[r] bytes; recv on all ranks gets them one after the
  // other in rank order.
  virtual absl::Status AllGatherV(const void* send, std::span<const int64_t> bytes_per_rank,
                                  void* recv) = 0;
  // COLLECTIVE. The same, to `root` alone; recv is ignored elsewhere.
  virtual absl::Status GatherV(const void* send, std::span<const int64_t> bytes_per_rank,
                               void* recv, int root) = 0;
  // COLLECTIVE. root's bytes to all. A rank that waits long for it sleeps instead of burning its
  // core.
  virtual absl::Status Broadcast(void* data, int64_t bytes, int root) = 0;
  // COLLECTIVE.
  virtual absl::Status Barrier() = 0;
};

// COLLECTIVE. The end of a start-up phase that can fail on one rank alone (memory, a file): OK on
// all ranks when every rank's status is OK; otherwise all ranks get the same error, that of the
// lowest failing rank, its message prefixed with "rank R (host): " when size() > 1. The same text
// from all ranks loses the prefix.
absl::Status Agree(Communicator& communicator, const absl::Status& mine);

}  // namespace lockstep
