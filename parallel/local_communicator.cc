#include "parallel/local_communicator.h"

#include <unistd.h>

#include <cstring>
#include <thread>

#include "parallel/shared_collectives.h"
#include "runtime/core/buffer.h"

namespace lockstep {
namespace {

class LocalCommunicator : public Communicator {
 public:
  LocalCommunicator(std::shared_ptr<Buffer> block, int rank, int size)
      : block_(std::move(block)), rank_(rank), size_(size), shared_(block_->data(), rank, size) {}

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::string host() const override {
    char name[256] = {};
    gethostname(name, sizeof(name) - 1);
    return name;
  }
  int ranks_on_host() const override { return size_; }
  int first_rank_on_host() const override { return 0; }

  absl::Status AllReduceSum(float* data, int64_t count) override {
    return shared_.AllReduceSum(data, count);
  }
  absl::Status AllGather(const void* send, int64_t bytes, void* recv) override {
    return shared_.AllGatherV(send, std::vector<int64_t>(size_, bytes), recv);
  }
  absl::Status AllGatherV(const void* send, std::span<const int64_t> bytes_per_rank,
                          void* recv) override {
    return shared_.AllGatherV(send, bytes_per_rank, recv);
  }
  absl::Status GatherV(const void* send, std::span<const int64_t> bytes_per_rank, void* recv,
                       int root) override {
    return shared_.GatherV(send, bytes_per_rank, recv, root);
  }
  absl::Status Broadcast(void* data, int64_t bytes, int root) override {
    return shared_.Broadcast(data, bytes, root);
  }
  absl::Status Barrier() override { return shared_.Barrier(); }

 private:
  const std::shared_ptr<Buffer> block_;  // held by all ranks of the group
  const int rank_;
  const int size_;
  SharedCollectives shared_;
};

}  // namespace

std::vector<std::unique_ptr<Communicator>> CreateLocalCommunicators(int size) {
  LOCKSTEP_CHECK(size >= 1);
  absl::StatusOr<Buffer> memory =
      Buffer::Create(SharedCollectives::BlockBytes(size), "the ranks' shared block");
  LOCKSTEP_CHECK(memory.ok());
  auto block = std::make_shared<Buffer>(std::move(*memory));
  std::memset(block->data(), 0, block->size_bytes());
  SharedCollectives::InitBlock(block->data(), size);
  std::vector<std::unique_ptr<Communicator>> communicators;
  for (int rank = 0; rank < size; ++rank) {
    communicators.push_back(std::make_unique<LocalCommunicator>(block, rank, size));
  }
  return communicators;
}

std::vector<absl::Status> RunLocalRanks(int size,
                                        const std::function<absl::Status(Communicator&)>& body) {
  std::vector<std::unique_ptr<Communicator>> communicators = CreateLocalCommunicators(size);
  std::vector<absl::Status> statuses(size);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      statuses[rank] = body(*communicators[rank]);
      // At once, not when all threads have ended: others may be waiting for a rank that gave up.
      communicators[rank].reset();
    });
  }
  for (std::thread& thread : threads) thread.join();
  return statuses;
}

}  // namespace lockstep
