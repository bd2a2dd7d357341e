// --check-tp: replays the first steps of a run on one rank, inside the job, and compares every
// tensor of the forward pass with what the ranks had. Names the first layer and tensor that are
// apart: a debugging aid for wrong tensor-parallel output.
//
// Rank 0 also holds the whole model (a decoder of one rank) and a whole KV pool with as many blocks
// as the ranks have. While a step runs, every rank keeps its tensors; then rank 0 runs the same
// batch on the whole model and, tensor by tensor in the order of the forward pass, gathers the
// ranks' shards and compares each with its columns: every rank's copy of what is replicated (hidden
// tensors, shared KV heads) as well. After that the ranks' values take the place of the tensor, so
// that the next one is computed from what the ranks computed theirs from: a difference is made
// where it is found, and rounding does not build up over layers and steps.
//
// Of a step the first and last kCheckedRows / 2 rows are compared (of norm and logits: of the rows
// of logits); the whole batch is computed. Memory, while it checks: on rank 0 the whole model's
// weights and KV cache besides its own; on each rank the kept rows, at most kCheckedRows * 4 bytes
// * the sum of its columns over all tensors and layers (a 7B model on 2 ranks: 1.2 GB), and k and v
// of the rows between in float32. The model and the rows are freed after the last checked step.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "model/checkpoint/checkpoint.h"
#include "model/decoder.h"
#include "model/forward_batch.h"
#include "model/tensor_observer.h"
#include "parallel/communicator.h"
#include "parallel/partition.h"
#include "runtime/core/thread_pool.h"
#include "runtime/step_plan.h"
#include "runtime/tensor_exchange.h"

namespace lockstep {

// The same on all ranks, and the same as the engine's.
struct TpCheckOptions {
  int64_t num_steps = 0;  // >= 1
  DType dtype = DType::kF32;
  DType kv_dtype = DType::kF32;
  int64_t max_num_batched_tokens = 0;
  int64_t max_model_len = 0;
  int64_t block_size = 0;
  int64_t num_blocks = 0;
  std::string attention_backend;  // as in EngineOptions
};

// Largest difference that rounding explains, relative to the largest magnitude of the row (of q, k
// and v, and of gate and up, each for itself). Activations are float32 whatever the dtype of the
// weights and the cache, and both sides compute a tensor from the same bits; they round inputs of
// products to bfloat16 alike. What is left is that a product split over ranks is summed in another
// order: a few units of 2^-24 of the summands, which may be some 100 times the sum where large ones
// cancel. Measured: below 2^-18 (a 30-layer model of 135M on 2 and 3 ranks).
inline constexpr double kTpTolerance = 0x1p-12;

// InvalidArgument on one rank: there is nothing to compare. The same verdict on all ranks.
absl::Status CheckTpNeedsRanks(int num_ranks);

class TpChecker {
 public:
  // COLLECTIVE. Rank 0 loads the whole model. On failure all ranks get the same status. The
  // references must outlive the checker.
  static absl::StatusOr<std::unique_ptr<TpChecker>> Create(
      const ModelSource& source, const TpCheckOptions& options,
      const std::vector<RankPartition>& partition, Communicator& communicator, ThreadPool& threads);
  ~TpChecker();

  // True while there are steps to check, on all ranks alike. From the first step on, for each step:
  // give `observer` to the rank's decoder, ChangePool, the decoder's Forward, Check.
  bool active() const;
  TensorObserver* observer();

  // What the step does to the KV pool beforehand. Not a collective.
  void ChangePool(std::span<const int32_t> poisoned_blocks,
                  std::span<const PlanBlockCopy> block_copies);
  // COLLECTIVE, with the batch that Forward was given. Internal on all ranks, with the same
  // message, when a tensor is apart by more than kTpTolerance: layer, tensor, ranks, row, column,
  // both values. The job must end then.
  absl::Status Check(const ForwardBatch& batch);

  // Rank 0. One line for the log: how much was compared, and the largest difference and its place.
  std::string Summary() const;

 private:
  struct Impl;
  explicit TpChecker(std::unique_ptr<Impl> impl);

  std::unique_ptr<Impl> impl_;
};

}  // namespace lockstep
