// A communicator that hands everything on to another one and notes in a RankProgress which
// collectives this rank has entered and passed.
#pragma once

#include "parallel/communicator.h"
#include "parallel/rank_progress.h"

namespace lockstep {

class WatchedCommunicator : public Communicator {
 public:
  // Both must outlive it.
  WatchedCommunicator(Communicator& inner, RankProgress& progress)
      : inner_(inner), progress_(progress) {}

  int rank() const override { return inner_.rank(); }
  int size() const override { return inner_.size(); }
  std::string host() const override { return inner_.host(); }
  int ranks_on_host() const override { return inner_.ranks_on_host(); }
  int first_rank_on_host() const override { return inner_.first_rank_on_host(); }

  absl::Status AllReduceSum(float* data, int64_t count) override;
  absl::Status AllGather(const void* send, int64_t bytes, void* recv) override;
  absl::Status AllGatherV(const void* send, std::span<const int64_t> bytes_per_rank,
                          void* recv) override;
  absl::Status GatherV(const void* send, std::span<const int64_t> bytes_per_rank, void* recv,
                       int root) override;
  absl::Status Broadcast(void* data, int64_t bytes, int root) override;
  absl::Status Barrier() override;

  // A collective has failed: a rank is gone, or the ranks have parted.
  bool failed() const { return failed_; }

 private:
  // Counts as passed only where it was: a rank whose collective failed stays in it.
  absl::Status Passed(const absl::Status& status);

  Communicator& inner_;
  RankProgress& progress_;
  bool failed_ = false;
};

}  // namespace lockstep
