// A decode step of one request as one kernel: every layer and the head, from the embedded token to
// the logits.
//
// Such a step is bound by the read of the weights. As a chain of kernels it stops reading at each
// of their borders; here the weights stream without a pause, into shared memory that takes them
// until what they are multiplied with is known (cuda_row_product.cuh). Between the parts of a layer
// the blocks of the GPU hand each other every value in a word that says of which exchange it is;
// behind the row-parallel products those of all ranks do, and every block adds the ranks' parts, in
// rank order, for itself.
//
// The same operators in the same order, with the same roundings, as the chain of kernels, but for
// the order of additions inside products and attention, and SwiGLU, which is rounded once.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "cache/kv_view.h"
#include "model/cuda_ops.h"
#include "parallel/peer_windows.h"
#include "runtime/core/buffer.h"
#include "runtime/core/cuda_device.h"
#include "runtime/core/range.h"
#include "runtime/core/status.h"

namespace lockstep {

// One layer of one rank, in device memory; biases and head norms may be null.
struct alignas(16) RowStepLayer {
  const float* input_norm = nullptr;  // [E]
  const void* qkv = nullptr;          // [(Hq_local + 2 * Hkv_local) * D, E]
  const void* qkv_bias = nullptr;
  const float* q_norm = nullptr;  // [D]
  const float* k_norm = nullptr;
  const void* o = nullptr;       // [E, Hq_local * D]
  const void* o_bias = nullptr;  // on one rank alone
  const float* post_attention_norm = nullptr;
  const void* gate_up = nullptr;  // [2 * F_local, E]
  const void* gate_up_bias = nullptr;
  const void* down = nullptr;       // [E, F_local]
  const void* down_bias = nullptr;  // on one rank alone
  void* keys = nullptr;             // of the layer's cache
  void* values = nullptr;
  int32_t sliding_window = 0;  // 0: none
  int32_t attending = 0;       // the kernel's own: blocks that attend in this step
};

// What all layers share. Sizes of one rank.
struct RowStepModel {
  DType dtype = DType::kBF16;    // of weights, activations and cache
  int64_t num_layers = 0;        // L
  int64_t hidden_size = 0;       // E
  int64_t head_dim = 0;          // D
  std::vector<Range> kv_groups;  // [Hkv_local] query heads of each KV head
  int64_t intermediate = 0;      // F_local
  int64_t vocab = 0;             // V_local
  float norm_eps = 0;
  float attention_scale = 0;
  float logit_softcap = 0;  // 0: none
  int64_t block_size = 0;   // P
  int64_t max_blocks = 0;   // of a block table
  const float* final_norm = nullptr;
  const void* head = nullptr;        // [V_local, E]
  std::vector<RowStepLayer> layers;  // [L]
  // Copies of 30 KB that a multiprocessor has on their way at a time; the best that was measured
  // (tests/bench/cuda_row_step_bench).
  int num_in_flight = 2;
};

// Device memory that each launch reads anew.
struct RowStepInputs {
  // [E] the embedded token; of several ranks, one has it and the others have zeros.
  const void* hidden = nullptr;
  RopeTable rope;
  const int32_t* seq_len = nullptr;       // tokens visible after the step; 0: a step of padding
  const int32_t* block_tables = nullptr;  // [tables, max_blocks]
  const int32_t* table_row = nullptr;
  const int64_t* slot = nullptr;  // of the new key and value; kNoSlot: nowhere
  float* logits = nullptr;        // [V_local]
};

// Of the words in which the ranks' parts of the sums of the embedding, of o and of down come
// together (PeerAddresses::words): [3, N, E].
inline int64_t RowSumBytes(int64_t hidden_size, int num_ranks) {
  return 3 * num_ranks * hidden_size * static_cast<int64_t>(sizeof(uint32_t));
}

class RowStep {
 public:
  // Unimplemented, by name, for what the kernel cannot do on the selected device, but for pointers:
  // float32, widths that are no multiples of 8, too long or of too unequal lengths, heads beyond
  // 256 or of no multiple of 8, more than 128 KV heads, more than 15 query heads of a KV head, too
  // little shared memory.
  static absl::Status Check(const RowStepModel& model);

  // Of a model that Check takes. `peers` is null for one rank, else it has RowSumBytes of words,
  // which are one RowStep's alone; ranks must have GPUs of one kind. What the model points to must
  // outlive the step. Errors are those of memory.
  static absl::StatusOr<RowStep> Create(const RowStepModel& model, const PeerWindows* peers,
                                        int num_multiprocessors, CudaStream stream);

  // The layers' caches, on the same device, of the model's dtype: before the first Launch.
  absl::Status SetCaches(const std::vector<KvCacheView>& caches, CudaStream stream);

  // COLLECTIVE over the ranks of `peers`, with the sum of the embedded token too. Neither waits nor
  // allocates; may be captured in a graph. Nothing else may run on the GPU at the same time: the
  // blocks wait for each other. A rank waits for those that have not launched theirs: see
  // PeerWindows::Abort.
  absl::Status Launch(const RowStepInputs& inputs, CudaStream stream) const;

 private:
  struct Plan;
  RowStep() = default;

  std::shared_ptr<Plan> plan_;
};

}  // namespace lockstep
