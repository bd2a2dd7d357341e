#include "runtime/engine_device.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "runtime/core/log.h"

namespace lockstep {

absl::StatusOr<DeviceKind> ResolveDevice(DeviceKind wanted, Communicator& communicator) {
  if (wanted != DeviceKind::kAuto) return wanted;
  const int32_t mine = NumCudaDevices();
  std::vector<int32_t> all(static_cast<size_t>(communicator.size()));
  LOCKSTEP_RETURN_IF_ERROR(communicator.AllGather(&mine, sizeof(mine), all.data()));
  const auto without = std::find_if(all.begin(), all.end(), [](int32_t n) { return n <= 0; });
  if (without == all.end()) return DeviceKind::kCuda;
  if (BuiltWithCuda() && communicator.rank() == 0) {
    const std::string why = mine > 0 ? "it sees no GPU" : std::string(FindCudaDevice().message());
    LogInfo(absl::StrFormat("device: cpu, because of rank %d: %s", without - all.begin(), why));
  }
  return DeviceKind::kCpu;
}

absl::StatusOr<std::unique_ptr<CudaSeat>> OpenCudaRank(Communicator& communicator,
                                                       int64_t window_bytes, int64_t words_bytes,
                                                       int max_nccl_blocks, RankLinks* links,
                                                       PhaseTimes& times) {
  auto seat = std::make_unique<CudaSeat>();
  LOCKSTEP_ASSIGN_OR_RETURN(seat->binding, BindCudaDevice(communicator));
  auto stream = OwnedCudaStream::Create();
  LOCKSTEP_RETURN_IF_ERROR(Agree(communicator, stream.status()));
  seat->stream = *std::move(stream);
  times.End("GPU");
  if (communicator.size() == 1) return seat;
  LOCKSTEP_ASSIGN_OR_RETURN(
      seat->nccl, NcclCommunicator::Create(communicator, seat->binding.device, max_nccl_blocks));
  seat->links = links;
  if (links != nullptr) links->Set(seat->nccl.get(), nullptr);
  times.End("NCCL");
  auto peers = PeerWindows::Create(communicator, window_bytes, words_bytes);
  times.End("peer windows");
  if (peers.ok()) {
    seat->peers = *std::move(peers);
    if (links != nullptr) links->Set(seat->nccl.get(), seat->peers.get());
  } else if (communicator.rank() == 0) {
    LogInfo(absl::StrFormat("sums over ranks: NCCL %s, because %s", NcclCommunicator::Version(),
                            std::string(peers.status().message())));
  }
  return seat;
}

}  // namespace lockstep
