#include "runtime/engine_device.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace lockstep {

absl::StatusOr<DeviceKind> ResolveDevice(DeviceKind wanted, Communicator& communicator) {
  if (wanted != DeviceKind::kAuto) return wanted;
  const int32_t mine = NumCudaDevices();
  std::vector<int32_t> all(static_cast<size_t>(communicator.size()));
  LOCKSTEP_RETURN_IF_ERROR(communicator.AllGather(&mine, sizeof(mine), all.data()));
  const bool everywhere = std::all_of(all.begin(), all.end(), [](int32_t n) { return n > 0; });
  return everywhere ? DeviceKind::kCuda : DeviceKind::kCpu;
}

absl::StatusOr<std::unique_ptr<CudaSeat>> OpenCudaRank(Communicator& communicator) {
  auto seat = std::make_unique<CudaSeat>();
  LOCKSTEP_ASSIGN_OR_RETURN(seat->binding, BindCudaDevice(communicator));
  auto stream = OwnedCudaStream::Create();
  LOCKSTEP_RETURN_IF_ERROR(Agree(communicator, stream.status()));
  seat->stream = *std::move(stream);
  if (communicator.size() > 1) {
    LOCKSTEP_ASSIGN_OR_RETURN(seat->nccl,
                              NcclCommunicator::Create(communicator, seat->binding.device));
  }
  return seat;
}

}  // namespace lockstep
