#include "parallel/peer_windows.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "runtime/core/cuda_errors.h"

namespace lockstep {

namespace {

constexpr int64_t kArrivalsBytes = int64_t{kMaxPeers} * kMaxPeerBlocks * sizeof(uint32_t);
constexpr int64_t kMeetingsBytes = int64_t{kMaxPeerBlocks} * sizeof(uint32_t);
// What is exported is whole pages of the GPU's memory, so nothing else lies in them.
constexpr int64_t kPageBytes = int64_t{2} << 20;

int64_t RoundUp(int64_t bytes, int64_t unit) { return (bytes + unit - 1) / unit * unit; }

int64_t FlagsOffset(int64_t window_bytes) { return PeerWindows::kNumWindows * window_bytes; }

// What the ranks tell each other.
struct RankMemory {
  cudaIpcMemHandle_t handle;
  int num_multiprocessors;
};

absl::Status Describe(void* memory, bool shared, RankMemory& description) {
  int device = 0;
  LOCKSTEP_CUDA(cudaGetDevice(&device));
  LOCKSTEP_CUDA(cudaDeviceGetAttribute(&description.num_multiprocessors,
                                       cudaDevAttrMultiProcessorCount, device));
  if (shared) LOCKSTEP_CUDA(cudaIpcGetMemHandle(&description.handle, memory));
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<PeerWindows>> PeerWindows::Create(Communicator& host,
                                                                 int64_t window_bytes,
                                                                 int64_t words_bytes) {
  LOCKSTEP_CHECK(window_bytes > 0 && words_bytes >= 0);
  absl::Status possible;
  if (host.ranks_on_host() != host.size() || host.size() > kMaxPeers) {
    possible = absl::InvalidArgumentError(absl::StrFormat(
        "%d ranks, %d of them on this host: GPUs read each other's memory on one host, up to %d",
        host.size(), host.ranks_on_host(), kMaxPeers));
  }
  std::unique_ptr<PeerWindows> windows(new PeerWindows());
  if (possible.ok()) {
    possible = windows->Allocate(host.rank(), host.size(), RoundUp(window_bytes, 256),
                                 RoundUp(words_bytes, 256));
  }
  LOCKSTEP_RETURN_IF_ERROR(Agree(host, possible));
  LOCKSTEP_RETURN_IF_ERROR(windows->Open(host));
  return windows;
}

absl::Status PeerWindows::Allocate(int rank, int size, int64_t window_bytes, int64_t words_bytes) {
  addresses_.rank = rank;
  addresses_.size = size;
  addresses_.window_bytes = window_bytes;
  addresses_.words_bytes = words_bytes;
  const int64_t bytes = RoundUp(
      FlagsOffset(window_bytes) + words_bytes + kArrivalsBytes + kMeetingsBytes, kPageBytes);
  LOCKSTEP_CUDA(cudaMalloc(&own_, static_cast<size_t>(bytes)));
  LOCKSTEP_CUDA(cudaMemset(own_, 0, static_cast<size_t>(bytes)));
  LOCKSTEP_CUDA(cudaDeviceSynchronize());
  LOCKSTEP_ASSIGN_OR_RETURN(abort_, PinnedBuffer::Create(sizeof(uint32_t), "abort flag"));
  *abort_.as<uint32_t>() = 0;
  addresses_.abort = abort_.as<uint32_t>();
  addresses_.windows[rank] = static_cast<char*>(own_);
  return absl::OkStatus();
}

// COLLECTIVE.
absl::Status PeerWindows::Open(Communicator& host) {
  RankMemory mine = {};
  absl::Status status = Describe(own_, addresses_.size > 1, mine);
  LOCKSTEP_RETURN_IF_ERROR(Agree(host, status));
  std::vector<RankMemory> all(addresses_.size);
  LOCKSTEP_RETURN_IF_ERROR(host.AllGather(&mine, sizeof(mine), all.data()));
  for (const RankMemory& memory : all) {
    max_blocks_ = std::min(max_blocks_, memory.num_multiprocessors);
  }
  for (int rank = 0; rank < addresses_.size && status.ok(); ++rank) {
    if (rank == addresses_.rank) continue;
    void* mapped = nullptr;
    status =
        CudaStatus(cudaIpcOpenMemHandle(&mapped, all[rank].handle, cudaIpcMemLazyEnablePeerAccess),
                   "cudaIpcOpenMemHandle");
    if (status.ok()) addresses_.windows[rank] = static_cast<char*>(mapped);
  }
  if (!status.ok()) status = Annotate(status, "the memory of another rank's GPU");
  for (int rank = 0; rank < addresses_.size; ++rank) {
    char* const behind_windows = addresses_.windows[rank] + FlagsOffset(addresses_.window_bytes);
    addresses_.words[rank] = reinterpret_cast<uint32_t*>(behind_windows);
    addresses_.arrivals[rank] =
        reinterpret_cast<uint32_t*>(behind_windows + addresses_.words_bytes);
  }
  addresses_.meetings = addresses_.arrivals[addresses_.rank] + kMaxPeers * kMaxPeerBlocks;
  // Nobody's kernel comes before everybody's counters are zero and mapped.
  return Agree(host, status);
}

void* PeerWindows::window(int index) const {
  LOCKSTEP_CHECK(index >= 0 && index < kNumWindows);
  return static_cast<char*>(own_) + index * addresses_.window_bytes;
}

void PeerWindows::Abort() {
  // The GPU reads it over the bus; nothing else depends on its order.
  std::atomic_ref<uint32_t>(*abort_.as<uint32_t>()).store(1);
}

void PeerWindows::Unmap() {
  for (int rank = 0; rank < addresses_.size; ++rank) {
    if (rank == addresses_.rank || addresses_.windows[rank] == nullptr) continue;
    cudaIpcCloseMemHandle(addresses_.windows[rank]);
    addresses_.windows[rank] = nullptr;
  }
}

absl::Status PeerWindows::Close(Communicator& host) {
  Unmap();
  // Memory may not go while another process has it mapped.
  LOCKSTEP_RETURN_IF_ERROR(host.Barrier());
  void* const own = std::exchange(own_, nullptr);
  LOCKSTEP_CUDA(cudaFree(own));
  return absl::OkStatus();
}

PeerWindows::~PeerWindows() {
  Unmap();
  // Others may have it mapped still, unless there are none.
  if (own_ != nullptr && addresses_.size == 1) cudaFree(own_);
}

}  // namespace lockstep
