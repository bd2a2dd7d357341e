// A communicator that hands everything on to another one: what a test wants to count, drop or
// change it overrides.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "parallel/communicator.h"

namespace lockstep {

class ForwardingCommunicator : public Communicator {
 public:
  // `inner` must outlive it.
  explicit ForwardingCommunicator(Communicator& inner) : inner_(inner) {}

  int rank() const override { return inner_.rank(); }
  int size() const override { return inner_.size(); }
  std::string host() const override { return inner_.host(); }
  int ranks_on_host() const override { return inner_.ranks_on_host(); }
  int first_rank_on_host() const override { return inner_.first_rank_on_host(); }
  absl::Status AllReduceSum(float* data, int64_t count) override {
    return inner_.AllReduceSum(data, count);
  }
  absl::Status AllGather(const void* send, int64_t bytes, void* recv) override {
    return inner_.AllGather(send, bytes, recv);
  }
  absl::Status AllGatherV(const void* send, std::span<const int64_t> bytes_per_rank,
                          void* recv) override {
    return inner_.AllGatherV(send, bytes_per_rank, recv);
  }
  absl::Status GatherV(const void* send, std::span<const int64_t> bytes_per_rank, void* recv,
                       int root) override {
    return inner_.GatherV(send, bytes_per_rank, recv, root);
  }
  absl::Status Broadcast(void* data, int64_t bytes, int root) override {
    return inner_.Broadcast(data, bytes, root);
  }
  absl::Status Barrier() override { return inner_.Barrier(); }

 private:
  Communicator& inner_;
};

}  // namespace lockstep
