// Which GPU belongs to which rank. One rank, one GPU.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "parallel/communicator.h"
#include "runtime/core/cuda_device.h"
#include "runtime/core/status.h"

namespace lockstep {

// What a rank tells the others about its GPU.
struct CudaRank {
  std::string host;
  std::string uuid;         // of its GPU (CudaDeviceInfo); empty: it has none
  int64_t num_devices = 0;  // that it may see
  std::string gpu_name = {};
  int64_t num_multiprocessors = 0;
  int64_t first_rank_on_host = 0;  // Communicator's
};

// COLLECTIVE. What every rank says, in rank order.
absl::StatusOr<std::vector<CudaRank>> GatherCudaRanks(Communicator& communicator,
                                                      const CudaRank& mine);

// Ranks before `rank` on its host: those of the same name and the same first rank.
int LocalRank(std::span<const CudaRank> ranks, int rank);

// The index of the device to take, or -1 where there are too few: 0 when exactly one is visible (a
// launcher that shows each rank its own), else the local rank.
int DeviceIndex(int local_rank, int64_t num_devices);

// One GPU a rank: InvalidArgument naming the first host where a rank has none or two ranks have the
// same, with the number of ranks and of GPUs there; the same text on every rank.
absl::Status CheckOneGpuPerRank(std::span<const CudaRank> ranks);

// All GPUs of one kind, by name and number of multiprocessors: kernels that meet those of other
// ranks must be as large there, and every rank's share of the work is the same. InvalidArgument
// naming rank 0, the first rank with another kind, their hosts and both GPUs; the same text on
// every rank.
absl::Status CheckSameKindOfGpu(std::span<const CudaRank> ranks);

struct CudaBinding {
  int device = 0;  // index among those that this process sees
  int local_rank = 0;
  CudaDeviceInfo info;
};

// COLLECTIVE. Finds this rank's device, selects it for this thread, and compares it with those of
// the others. Errors are the same on all ranks: FailedPrecondition when some rank sees no GPU,
// cannot use it or is built without CUDA, InvalidArgument as above.
absl::StatusOr<CudaBinding> BindCudaDevice(Communicator& communicator);

}  // namespace lockstep
