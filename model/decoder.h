// The decoder-only transformer of one rank: its shard of the weights and the forward pass.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "attention/attention_backend.h"
#include "cache/kv_pool.h"
#include "model/checkpoint/checkpoint.h"
#include "model/forward_batch.h"
#include "model/model_config.h"
#include "model/tensor_observer.h"
#include "parallel/communicator.h"
#include "runtime/core/thread_pool.h"

namespace lockstep {

struct DecoderOptions {
  DType dtype = DType::kF32;  // weights and products; activations between layers are float32 on CPU
  int64_t max_num_batched_tokens = 0;  // largest T of a step: sizes the scratch memory
  int64_t max_model_len = 0;           // largest position + 1
};

class DeviceDecoder;

class Decoder {
 public:
  virtual ~Decoder() = default;

  // Reads this rank's shard (partition[communicator.rank()]) and allocates all scratch memory. Not
  // a collective: the caller ends the phase with Agree. The references must outlive the decoder.
  static absl::StatusOr<std::unique_ptr<Decoder>> Load(const ModelSource& source,
                                                       const std::vector<RankPartition>& partition,
                                                       const DecoderOptions& options,
                                                       const AttentionBackend& attention,
                                                       Communicator& communicator,
                                                       ThreadPool& threads);

  // COLLECTIVE. One step over the packed batch: writes K and V of the new tokens into the pool and
  // this rank's columns of the logits of batch.logits_rows into `logits`, float32 [R, V_local].
  virtual absl::Status Forward(const ForwardBatch& batch, const KvPool& pool,
                               const MatrixView& logits) = 0;

  // COLLECTIVE, once, before the first Forward, when the pool stands: what can be made ready.
  virtual absl::Status Prepare(const KvPool&) { return absl::OkStatus(); }
  // This decoder, where its steps run on a device; else null.
  virtual DeviceDecoder* device() { return nullptr; }

  // Attention geometry of a layer on this rank, and the pool's shape for block_size P.
  virtual const AttentionGeometry& Geometry(int64_t layer) const = 0;
  virtual int64_t weight_bytes() const = 0;
  // A line about what the decoder has checked by itself; empty when it was not asked to.
  virtual std::string CheckSummary() const { return ""; }

  // Shows `observer` the tensors of every Forward from now on; null, the default: nobody looks. On
  // all ranks or on none: without one the last layer leaves out rows without logits.
  void set_observer(TensorObserver* observer) { observer_ = observer; }

 protected:
  void Observe(int64_t layer, TensorKind kind, const MatrixView& local) const {
    if (observer_ != nullptr) observer_->Observe(layer, kind, local);
  }
  bool observed() const { return observer_ != nullptr; }
  TensorObserver* observer() const { return observer_; }

 private:
  TensorObserver* observer_ = nullptr;
};

// A decoder that works on a device, in the order of the rank's stream, while the host goes on.
class DeviceDecoder : public Decoder {
 public:
  DeviceDecoder* device() final { return this; }

  // COLLECTIVE. Issues the step of Forward and returns; nothing that `batch` points to is read
  // afterwards. A negative token id -1 - s stands for last_tokens()[s] as it is when the step runs.
  // The result is float32 [R, V_local] in device memory, until the next step is issued.
  virtual absl::StatusOr<MatrixView> Enqueue(const ForwardBatch& batch, const KvPool& pool) = 0;
  // int32 [slots], device memory: the token last sampled in each slot, written by who samples.
  virtual int32_t* last_tokens() const = 0;
};

}  // namespace lockstep
