// What connects a rank's GPU with those of other ranks, as far as a thread that watches the job
// must reach it: errors that NCCL meets by itself, and the end of kernels that wait for a rank
// which is gone.
#pragma once

#include <atomic>
#include <functional>
#include <mutex>

#include "parallel/rank_progress.h"
#include "runtime/core/status.h"

namespace lockstep {

class NcclCommunicator;
class PeerWindows;

// Thread-safe.
class RankLinks {
 public:
  // Both may be null. They stay until Clear, or another Set.
  void Set(NcclCommunicator* nccl, PeerWindows* peers);
  // Before what was set goes.
  void Clear() { Set(nullptr, nullptr); }

  // NCCL's asynchronous error; OK where there is none, or no NCCL.
  absl::Status AsyncError() const;

  // Waits of the host for its GPU end, with an Aborted status, as do kernels that wait for other
  // ranks' windows. At once.
  void Stop();
  // Whoever waits for the GPU looks at it.
  const std::atomic<bool>& stopped() const { return stopped_; }
  // Kernels of NCCL end, too. May take a while. Once, after Stop.
  void AbortNccl();

 private:
  mutable std::mutex mutex_;
  NcclCommunicator* nccl_ = nullptr;
  PeerWindows* peers_ = nullptr;
  std::atomic<bool> stopped_ = false;
};

// What a rank shows to the watch of its job.
struct WatchedRank {
  RankProgress progress;
  RankLinks links;
  // Ends the job because of an error that this rank cannot share with the others. Does not return.
  // Empty: nobody does. Any thread.
  std::function<void(const absl::Status&)> fail = {};
};

}  // namespace lockstep
