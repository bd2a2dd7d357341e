// Where the ranks of an engine compute.
#pragma once

#include <memory>

#include "parallel/communicator.h"
#include "parallel/cuda_ranks.h"
#include "parallel/nccl_communicator.h"
#include "runtime/core/cuda_device.h"
#include "runtime/engine.h"

namespace lockstep {

// COLLECTIVE. kAuto becomes kCuda where every rank sees a GPU, else kCpu; the others stay.
absl::StatusOr<DeviceKind> ResolveDevice(DeviceKind wanted, Communicator& communicator);

// A rank's GPU and what it needs there. Destroyed after everything that uses it.
struct CudaSeat {
  CudaBinding binding;
  OwnedCudaStream stream;
  std::unique_ptr<NcclCommunicator> nccl;  // null: one rank
};

// COLLECTIVE. One GPU a rank, a stream, and NCCL between them; errors are the same on all ranks.
absl::StatusOr<std::unique_ptr<CudaSeat>> OpenCudaRank(Communicator& communicator);

}  // namespace lockstep
