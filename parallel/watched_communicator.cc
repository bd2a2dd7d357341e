#include "parallel/watched_communicator.h"

#include <numeric>

namespace lockstep {

namespace {

int64_t Total(std::span<const int64_t> bytes) {
  return std::accumulate(bytes.begin(), bytes.end(), int64_t{0});
}

}  // namespace

absl::Status WatchedCommunicator::Passed(const absl::Status& status) {
  if (status.ok()) {
    progress_.Pass();
  } else {
    failed_ = true;
  }
  return status;
}

absl::Status WatchedCommunicator::AllReduceSum(float* data, int64_t count) {
  progress_.Enter(CollectiveKind::kAllReduce, count * int64_t{sizeof(float)});
  return Passed(inner_.AllReduceSum(data, count));
}

absl::Status WatchedCommunicator::AllGather(const void* send, int64_t bytes, void* recv) {
  progress_.Enter(CollectiveKind::kAllGather, bytes * size());
  return Passed(inner_.AllGather(send, bytes, recv));
}

absl::Status WatchedCommunicator::AllGatherV(const void* send,
                                             std::span<const int64_t> bytes_per_rank, void* recv) {
  progress_.Enter(CollectiveKind::kAllGather, Total(bytes_per_rank));
  return Passed(inner_.AllGatherV(send, bytes_per_rank, recv));
}

absl::Status WatchedCommunicator::GatherV(const void* send, std::span<const int64_t> bytes_per_rank,
                                          void* recv, int root) {
  progress_.Enter(CollectiveKind::kGather, Total(bytes_per_rank));
  return Passed(inner_.GatherV(send, bytes_per_rank, recv, root));
}

absl::Status WatchedCommunicator::Broadcast(void* data, int64_t bytes, int root) {
  progress_.Enter(CollectiveKind::kBroadcast, bytes);
  return Passed(inner_.Broadcast(data, bytes, root));
}

absl::Status WatchedCommunicator::Barrier() {
  progress_.Enter(CollectiveKind::kBarrier, 0);
  return Passed(inner_.Barrier());
}

}  // namespace lockstep
