// Between the kernel of a decode step (cuda_row_step_kernel.cu) and who describes the model to it
// (cuda_row_step.cu).
#pragma once

#include "model/cuda_row_product.cuh"
#include "model/cuda_row_step.h"

namespace lockstep {

// Rows that are added up over ranks: the embedding's, and what o and down give.
enum RowSum { kEmbeddingSum, kOSum, kDownSum };

// Products of a layer, and the head.
enum RowProductKind { kQkv, kO, kGateUp, kDown, kHead, kNumRowProducts };

struct RowStepArgs {
  RowAttentionParams attention;
  RowProduct products[kNumRowProducts];
  const RowStepLayer* layers;
  int num_layers;
  int hidden_size;
  int largest_group;
  int num_slots;
  int num_in_flight;
  float norm_eps;
  const float* final_norm;
  const char* head;
  const void* hidden;
  uint32_t* qkv;    // words (cuda_row_words.cuh) [(Hq_local + 2 * Hkv_local) * D]
  void* activated;  // [F_local]
  float* logits;
  // Rows that all ranks add up: of each rank, in its memory, words [3, N, E], of which
  // every rank writes its own.
  int rank;
  int num_ranks;
  uint32_t* sums[kMaxPeers];
  uint32_t* arrivals;     // of blocks of this GPU at exchanges
  uint32_t* progress;     // [grid, 2] of each block: number of the last exchange, arrivals by then
  const uint32_t* abort;  // null: one rank
};

// Chunks of a warp that there are kernels for: of products of the residual stream and of
// attention's result, one number for all of them, and of SwiGLU's.
inline constexpr int kShortRowChunks[] = {1, 2, 4};
inline constexpr int kLongRowChunks[] = {2, 3, 5};

// Shared memory of a block, but for the ring's slots.
int64_t RowStepSharedBytes(int64_t hidden_size, int64_t num_layers, int64_t largest_group,
                           int64_t head_dim);

// Once, before the first launch: raises the kernel's shared memory.
absl::Status PrepareRowStepKernel(DType dtype, const RowStepArgs& args, int64_t shared_bytes);
absl::Status LaunchRowStepKernel(DType dtype, const RowStepArgs& args, int grid,
                                 int64_t shared_bytes, CudaStream stream);

}  // namespace lockstep
