// A build without CUDA has no NCCL, and says so.
#include "parallel/nccl_communicator.h"

namespace lockstep {

absl::StatusOr<std::unique_ptr<NcclCommunicator>> NcclCommunicator::Create(Communicator&, int) {
  return absl::UnimplementedError("this build of Lockstep has no NCCL: use --device cpu");
}
NcclCommunicator::~NcclCommunicator() = default;

}  // namespace lockstep
