// Collectives between the GPUs of one job, over NCCL, on a stream.
//
// Unlike Communicator's, calls return when the work is in the stream, and may be captured in a
// graph. COLLECTIVE: all ranks call the same in the same order, all on one stream a rank, or on
// streams that events keep in that order: two may not run at the same time. Thread rule: the rank's
// engine thread, except for AsyncError and Abort, which one other thread may call.
//
// Order of sums: NCCL's, which depends on the size of the message and on the machine; the result is
// the same bits on all ranks. 16-bit data is added in pairs, each sum rounded to its dtype.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "parallel/communicator.h"
#include "runtime/core/cuda_device.h"
#include "runtime/core/dtype.h"
#include "runtime/core/status.h"

struct ncclComm;

namespace lockstep {

class NcclCommunicator {
 public:
  // COLLECTIVE. The ranks of `host`, on the selected device of each (see BindCudaDevice), which
  // `device` must name. Errors are the same on all ranks: those of CheckOneGpuPerRank, found before
  // NCCL is asked, else NCCL's own text and what there is to try (Internal, or DeadlineExceeded
  // where a rank still waits for others), within half a minute for each of connecting and the first
  // sums on one host. After such a failure the process should end. A job of one rank does not use
  // NCCL.
  //
  // max_blocks: a collective takes no more blocks, which are multiprocessors, 1 to kMaxBlocks and
  // the same on all ranks; 0: NCCL's choice for this machine. NCCL_MAX_CTAS in the environment is
  // stronger.
  static constexpr int kMaxBlocks = 64;
  static absl::StatusOr<std::unique_ptr<NcclCommunicator>> Create(Communicator& host, int device,
                                                                  int max_blocks = 0);
  // Waits for nothing: the stream must be idle, or Abort called.
  ~NcclCommunicator();
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  // "2.28.9": of the library that this process runs with.
  static std::string Version();

  // COLLECTIVE. In place: data[i] = sum over ranks. `dtype` [count], device memory.
  absl::Status AllReduceSum(void* data, int64_t count, DType dtype, CudaStream stream);
  // COLLECTIVE. Every rank's `bytes` bytes, in rank order, into recv [size() * bytes] on all ranks.
  // send may be its own place in recv.
  absl::Status AllGather(const void* send, int64_t bytes, void* recv, CudaStream stream);
  // COLLECTIVE. root's bytes to all.
  absl::Status Broadcast(void* data, int64_t bytes, int root, CudaStream stream);

  // An error that NCCL met after a call had returned (a peer that is gone, a link that broke); OK
  // otherwise.
  absl::Status AsyncError() const;
  // Kernels that wait for peers end, with wrong results; the communicator is of no more use. From
  // any thread, while the engine's thread waits for the stream. Once.
  void Abort();

 private:
  NcclCommunicator(int rank, int size) : rank_(rank), size_(size) {}
  absl::Status Connect(Communicator& host, int max_blocks);
  absl::Status WarmUp(Communicator& host);
  absl::Status UseOnce(int device, const DeviceBuffer& data);
  // The communicator to use, null where there is one rank; an error after Abort.
  absl::StatusOr<ncclComm*> Usable() const;

  int rank_;
  int size_;
  std::atomic<bool> aborted_ = false;
  std::atomic<ncclComm*> comm_ = nullptr;  // null: one rank, or aborted
};

}  // namespace lockstep
