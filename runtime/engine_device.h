// Where the ranks of an engine compute.
#pragma once

#include <memory>

#include "parallel/communicator.h"
#include "parallel/cuda_ranks.h"
#include "parallel/nccl_communicator.h"
#include "parallel/peer_windows.h"
#include "parallel/rank_links.h"
#include "runtime/core/cuda_device.h"
#include "runtime/core/phase_times.h"
#include "runtime/engine.h"

namespace lockstep {

// COLLECTIVE. kAuto becomes kCuda where every rank sees a GPU, else kCpu; the others stay.
absl::StatusOr<DeviceKind> ResolveDevice(DeviceKind wanted, Communicator& communicator);

// A rank's GPU and what it needs there. Destroyed after everything that uses it.
struct CudaSeat {
  ~CudaSeat() {
    if (links != nullptr) links->Clear();
  }
  CudaBinding binding;
  OwnedCudaStream stream;
  std::unique_ptr<NcclCommunicator> nccl;  // null: one rank
  std::unique_ptr<PeerWindows> peers;      // null: one rank, or GPUs that do not reach each other
  RankLinks* links = nullptr;              // knows `nccl` and `peers`; null: nothing does
};

// COLLECTIVE. One GPU a rank, a stream, NCCL between them, and, where they can, windows of
// `window_bytes` into each other's memory, and `words_bytes` of words; rank 0 logs why not.
// max_nccl_blocks: see NcclCommunicator. `links` (may be null) outlives the seat. Errors are the
// same on all ranks.
absl::StatusOr<std::unique_ptr<CudaSeat>> OpenCudaRank(Communicator& communicator,
                                                       int64_t window_bytes, int64_t words_bytes,
                                                       int max_nccl_blocks, RankLinks* links,
                                                       PhaseTimes& times);

}  // namespace lockstep
