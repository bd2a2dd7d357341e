// Shows the tensors of a forward pass on a GPU to an observer on the host: for debugging. The host
// waits for every tensor and copies it.
#pragma once

#include <cstdint>
#include <span>

#include "cache/kv_view.h"
#include "model/kv_rows.h"
#include "model/tensor_observer.h"
#include "runtime/core/buffer.h"
#include "runtime/core/cuda_device.h"
#include "runtime/core/status.h"

namespace lockstep {

// Thread rule: the rank's engine thread. Stream rule: tensors are those that `stream` has computed
// when it comes to the call. Allocates host memory as tensors grow; ResourceExhausted where there
// is none.
class CudaObservation {
 public:
  explicit CudaObservation(CudaStream stream) : stream_(stream) {}

  // Before the tensors of a step. observer null: nobody looks, and the calls below do nothing.
  // `slots`: the step's slot mapping, host memory; of a step of T tokens [T].
  void BeginStep(TensorObserver* observer, std::span<const int64_t> slots, int64_t block_size);

  bool active() const { return observer_ != nullptr; }

  // A matrix in device memory, without gaps between rows.
  absl::Status Show(int64_t layer, TensorKind kind, const MatrixView& tensor);
  // qkv [T, (Hq_local + 2 * Hkv_local) * D] behind NormRopeWriteKv, which has put keys and values
  // into `cache` and nowhere else: shown are those, as attention will read them.
  absl::Status ShowQkv(int64_t layer, const MatrixView& qkv, const KvCacheView& cache);

 private:
  absl::StatusOr<MatrixView> Read(const MatrixView& tensor);
  absl::Status Write(const MatrixView& values, const MatrixView& tensor);
  absl::StatusOr<KvCacheView> ReadBlocks(const KvCacheView& cache);
  absl::Status WriteBlocks(const KvCacheView& blocks, const KvCacheView& cache);
  // to and from device memory, waiting.
  absl::Status Copy(void* to, const void* from, int64_t bytes);

  const CudaStream stream_;
  TensorObserver* observer_ = nullptr;
  TouchedBlocks touched_;
  Buffer stored_;  // a tensor as the device has it
  Buffer values_;  // in float32
  Buffer blocks_;  // of the KV cache: touched_'s keys, then their values
};

}  // namespace lockstep
