// The model of one rank, whole, beside rank 0's share: what --check-tp compares with.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "cache/kv_pool.h"
#include "model/attention_selection.h"
#include "model/checkpoint/checkpoint.h"
#include "model/decoder.h"
#include "model/kv_scales.h"
#include "parallel/communicator.h"
#include "parallel/partition.h"
#include "runtime/core/thread_pool.h"
#include "runtime/engine_device.h"
#include "runtime/step_plan.h"

namespace lockstep {

// The same as the engine's.
struct WholeModelOptions {
  DType dtype = DType::kF32;
  DType kv_dtype = DType::kF32;
  int64_t max_num_batched_tokens = 0;
  int64_t max_num_seqs = 0;     // on a GPU
  int64_t max_logits_rows = 0;  // on a GPU
  int64_t max_model_len = 0;
  int64_t block_size = 0;
  std::string attention_backend = {};  // as in EngineOptions
};

class WholeModel {
 public:
  // Weights and scratch memory, on the GPU of `cuda` or, where that is null, on the CPU.
  // `partition`: of one rank. The references must outlive the model. Not a collective.
  static absl::StatusOr<std::unique_ptr<WholeModel>> Load(const ModelSource& source,
                                                          const WholeModelOptions& options,
                                                          const RankPartition& partition,
                                                          const CudaSeat* cuda,
                                                          ThreadPool& threads);

  // What a block of the KV pool takes of the GPU; 0 on the CPU.
  int64_t gpu_bytes_per_block() const { return on_cuda_ ? shape_.BytesPerBlock() : 0; }
  // Before the first step: as many blocks as the ranks have.
  absl::Status CreatePool(int64_t num_blocks);
  // What a step does to the KV pool beforehand.
  absl::Status ChangePool(std::span<const int32_t> poisoned_blocks,
                          std::span<const PlanBlockCopy> block_copies);
  // A step, shown to `observer`. With `ranks`, the rank's own decoder on the same GPU, the last
  // tokens of its slots stand for this model's, too.
  absl::Status Run(const ForwardBatch& batch, const DeviceDecoder* ranks, TensorObserver& observer);

 private:
  WholeModel() = default;

  WholeModelOptions options_;
  KvPoolShape shape_;
  int64_t vocab_size_ = 0;
  bool on_cuda_ = false;
  CudaStream stream_ = nullptr;
  KvScales kv_scales_;                           // of an fp8 cache
  std::unique_ptr<Communicator> communicator_;   // on the CPU
  std::unique_ptr<AttentionBackend> attention_;  // on the CPU
  std::unique_ptr<Decoder> decoder_;
  KvPool pool_;
};

}  // namespace lockstep
