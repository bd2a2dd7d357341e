// A build without CUDA has neither NCCL nor windows between GPUs, and says so.
#include "parallel/nccl_communicator.h"
#include "parallel/peer_windows.h"

namespace lockstep {

namespace {
absl::Status WithoutCuda() {
  return absl::UnimplementedError("this build of Lockstep has no CUDA: use --device cpu");
}
}  // namespace

absl::StatusOr<std::unique_ptr<NcclCommunicator>> NcclCommunicator::Create(Communicator&, int,
                                                                           int) {
  return WithoutCuda();
}
NcclCommunicator::~NcclCommunicator() = default;
std::string NcclCommunicator::Version() { return "absent"; }
absl::Status NcclCommunicator::AsyncError() const { return WithoutCuda(); }
void NcclCommunicator::Abort() {}

absl::StatusOr<std::unique_ptr<PeerWindows>> PeerWindows::Create(Communicator&, int64_t, int64_t) {
  return WithoutCuda();
}
PeerWindows::~PeerWindows() = default;
void PeerWindows::Abort() {}

}  // namespace lockstep
