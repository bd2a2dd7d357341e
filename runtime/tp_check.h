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
// On GPUs the whole model is on rank 0's GPU and runs the same kernels. Steps that are compared are
// launched kernel by kernel, without graphs and without the kernel that is a whole decode step, and
// every tensor is waited for; sums over ranks are made by the kernels that make them otherwise.
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
#include "runtime/engine_device.h"
#include "runtime/step_plan.h"
#include "runtime/tensor_exchange.h"
#include "runtime/whole_model.h"

namespace lockstep {

// The same on all ranks.
struct TpCheckOptions {
  int64_t num_steps = 0;  // >= 1
  WholeModelOptions model = {};
};

// Largest differences that rounding explains, relative to the largest magnitude of the row (of q, k
// and v, and of gate and up, each for itself). Both sides compute a tensor from the same bits, so
// what is left is that a product split over ranks is summed in another order.
//
// float32, 2^-12: a few units of 2^-24 of the summands, which may be some 100 times the sum where
// large ones cancel. Measured: below 2^-18 (a 30-layer model of 135M on 2 and 3 CPU ranks).
// Activations on the CPU are float32 whatever the dtype of the weights and the cache, and both
// sides round inputs of products to bfloat16 alike.
//
// bfloat16, 2^-5, and float16, 2^-8, on GPUs: 4 units in the last place of the row's largest. A
// result may round to the neighbour of what it rounds to on one rank, or two such results rotate or
// norm into one (2 to 3 units); each rank rounds its part of a sum (half a unit of the part).
//
// Keys and values in E4M3, 2^-2: the neighbour of a number of 4 bits is 2^-3 away.
struct TpTolerances {
  double activations = 0;
  double keys_and_values = 0;  // as read back from the cache; at least `activations`
};
TpTolerances TpTolerancesOf(DType activations, DType keys_and_values);

// InvalidArgument on one rank: there is nothing to compare. The same verdict on all ranks.
absl::Status CheckTpNeedsRanks(int num_ranks);

class TpChecker {
 public:
  // COLLECTIVE. Rank 0 loads the whole model, on its GPU where there is one (`cuda`, null on the
  // CPU), before the size of the KV pools is known: what it takes is then no more free. On failure
  // all ranks get the same status. The references must outlive the checker.
  static absl::StatusOr<std::unique_ptr<TpChecker>> Create(
      const ModelSource& source, const TpCheckOptions& options,
      const std::vector<RankPartition>& partition, const CudaSeat* cuda, Communicator& communicator,
      ThreadPool& threads);
  ~TpChecker();

  // What a block of the whole model's KV pool takes of this rank's GPU; 0 where that is nothing.
  int64_t gpu_bytes_per_block() const;
  // COLLECTIVE, before the first step: a pool of as many blocks as the ranks have.
  absl::Status CreatePool(int64_t num_blocks);

  // True while there are steps to check, on all ranks alike. From the first step on, for each step:
  // give `observer` to the rank's decoder, ChangePool, the decoder's Forward, Check.
  bool active() const;
  TensorObserver* observer();

  // What the step does to the KV pool beforehand. Not a collective; fails on a GPU alone.
  absl::Status ChangePool(std::span<const int32_t> poisoned_blocks,
                          std::span<const PlanBlockCopy> block_copies);
  // COLLECTIVE, with the batch that Forward was given, and on a GPU the decoder that has run it
  // (else null). Internal on all ranks, with the same message, when a tensor is apart by more than
  // its tolerance: layer, tensor, ranks, row, column, both values. The job must end then.
  absl::Status Check(const ForwardBatch& batch, const DeviceDecoder* device);

  // Rank 0. One line for the log: how much was compared, and the largest difference and its place.
  std::string Summary() const;

 private:
  struct Impl;
  explicit TpChecker(std::unique_ptr<Impl> impl);

  std::unique_ptr<Impl> impl_;
};

}  // namespace lockstep
