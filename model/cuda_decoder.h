// The decoder of one rank on one GPU.
#pragma once

#include <memory>
#include <vector>

#include "model/decoder.h"
#include "parallel/nccl_communicator.h"
#include "parallel/peer_windows.h"
#include "runtime/core/cuda_device.h"

namespace lockstep {

struct CudaDecoderOptions {
  DType dtype = DType::kBF16;          // weights and activations
  DType kv_dtype = DType::kBF16;       // of the KV cache
  int64_t max_num_batched_tokens = 0;  // largest T
  int64_t max_num_seqs = 0;            // largest B
  int64_t max_logits_rows = 0;         // largest R
  int64_t max_model_len = 0;
  int64_t block_size = 0;
  bool graphs = true;  // decode steps are replayed as CUDA graphs
  // On several ranks: in steps of so many tokens, but for those that are graphs, sums over ranks
  // run beside products (cuda_overlap.h); 0: in none.
  int64_t overlap_min_tokens = 0;
  int overlap_spare_multiprocessors = 0;  // products beside a sum leave it so many
  // Every attention is compared (cuda_attention_check.h): no graphs, no fused decode step.
  bool check_attention = false;
  // No step is made without an observer: no fused decode step is made ready.
  bool always_observed = false;
};

// What the decoder needs of the rank's device; must outlive it.
struct CudaRankContext {
  CudaStream stream = nullptr;
  NcclCommunicator* nccl = nullptr;  // null: one rank
  // Null: one rank, or ranks that do not read each other's memory; NCCL then makes every sum.
  const PeerWindows* peers = nullptr;
  CudaDeviceInfo info;
};

// As Decoder::Load; the result is a DeviceDecoder. Steps take a pool on the same device, whose
// stream is the context's. Forward writes the logits to host memory (page-locked, to be fast): when
// it returns, the step is done.
//
// With an observer, steps are launched kernel by kernel (no graphs, no fused decode step), and
// Enqueue waits for every tensor. One that writes is for a decoder of one rank.
absl::StatusOr<std::unique_ptr<Decoder>> LoadCudaDecoder(
    const ModelSource& source, const std::vector<RankPartition>& partition, int rank,
    const CudaDecoderOptions& options, const CudaRankContext& context, ThreadPool& threads);

}  // namespace lockstep
