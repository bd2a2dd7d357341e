// Memory that the GPUs of one host read from each other: what a kernel that sums over ranks needs.
//
// Every rank has kNumWindows windows for its partial sums, and counters by which the blocks of such
// a kernel meet: block b of every rank, once a sum. The rules, which make it safe with no barrier
// after the reads:
//
// - All ranks make the same sums in the same order, with the same number of blocks, on one stream a
//   rank.
// - Two sums that follow each other use different windows. A rank that has met the others in a sum
//   knows that they have ended the sum before it: the window of that one may be written again.
//   Three windows, because the next step begins with window 0 and a step may have an odd number of
//   sums.
// - What writes a window, and what sums, begins when the kernel before it in the stream has ended.
#pragma once

#include <cstdint>
#include <memory>

#include "parallel/communicator.h"
#include "runtime/core/cuda_device.h"
#include "runtime/core/status.h"

namespace lockstep {

inline constexpr int kMaxPeers = 8;
inline constexpr int kMaxPeerBlocks = 128;

// Passed to kernels by value. Device addresses, valid on this rank's GPU.
struct PeerAddresses {
  int rank = 0;
  int size = 0;
  char* windows[kMaxPeers] = {};       // the first window of each rank
  uint32_t* arrivals[kMaxPeers] = {};  // of each rank: [kMaxPeers][kMaxPeerBlocks], by who arrived
  uint32_t* meetings = nullptr;        // [kMaxPeerBlocks]: how often each block has met its peers
  // Of each rank, one counter: for kernels whose blocks all meet, of all ranks.
  uint32_t* step_arrivals[kMaxPeers] = {};
  const uint32_t* abort = nullptr;  // page-locked host memory; not 0: wait no more
  int64_t window_bytes = 0;
};

class PeerWindows {
 public:
  static constexpr int kNumWindows = 3;

  // COLLECTIVE. For the selected device. Errors are the same on all ranks: InvalidArgument when the
  // ranks are on several hosts or more than kMaxPeers, else that of the GPU that cannot give or
  // reach memory. One rank has windows, too.
  static absl::StatusOr<std::unique_ptr<PeerWindows>> Create(Communicator& host,
                                                             int64_t window_bytes);
  // When no rank's kernel uses them any more: after a Barrier of the host's communicator behind an
  // idle stream. Skipped where the job ends in an error: the memory is then the driver's to free.
  absl::Status Close(Communicator& host);
  ~PeerWindows();
  PeerWindows(const PeerWindows&) = delete;
  PeerWindows& operator=(const PeerWindows&) = delete;

  // This rank's window, 256-byte aligned; index in [0, kNumWindows).
  void* window(int index) const;
  int64_t window_bytes() const { return addresses_.window_bytes; }
  const PeerAddresses& addresses() const { return addresses_; }

  // Kernels that wait for peers end, with wrong results. From any thread.
  void Abort();

 private:
  PeerWindows() = default;
  absl::Status Allocate(int rank, int size, int64_t window_bytes);
  absl::Status Open(Communicator& host);
  void Unmap();

  void* own_ = nullptr;  // windows, arrivals, meetings: one allocation
  PinnedBuffer abort_;
  PeerAddresses addresses_;
};

}  // namespace lockstep
