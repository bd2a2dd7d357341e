#include "parallel/rank_links.h"

#include "parallel/nccl_communicator.h"
#include "parallel/peer_windows.h"

namespace lockstep {

void RankLinks::Set(NcclCommunicator* nccl, PeerWindows* peers) {
  const std::lock_guard lock(mutex_);
  nccl_ = nccl;
  peers_ = peers;
  // What is made while the job ends does not outlast it.
  if (stopped_ && peers_ != nullptr) peers_->Abort();
}

absl::Status RankLinks::AsyncError() const {
  const std::lock_guard lock(mutex_);
  return nccl_ == nullptr ? absl::OkStatus() : nccl_->AsyncError();
}

void RankLinks::Stop() {
  stopped_ = true;
  const std::lock_guard lock(mutex_);
  if (peers_ != nullptr) peers_->Abort();
}

void RankLinks::AbortNccl() {
  const std::lock_guard lock(mutex_);
  if (nccl_ != nullptr) nccl_->Abort();
}

}  // namespace lockstep
