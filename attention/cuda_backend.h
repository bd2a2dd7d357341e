// "cuda": paged attention on a CUDA device behind the AttentionBackend interface.
//
// All MatrixViews and caches given to it are device memory; batches and slots are host memory and
// are copied to the device in stream order. Calls return when the work is issued to the stream that
// was given at creation. A forward pass that keeps its batch on the device, or is captured in a
// graph, uses attention/cuda_attention.h itself; the kernels are the same.
//
// The header may be included in a build without CUDA, where nothing of it exists.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "attention/attention_backend.h"
#include "attention/cuda_attention.h"

namespace lockstep {

// What the kernels can do, for the selector; needs no device.
const AttentionCapabilities& CudaAttentionCapabilities();

class CudaBackend : public AttentionBackend {
 public:
  struct Options {
    CudaAttentionWorkspace::Options sizes;
    int64_t block_size = 16;  // the smallest, for the room of block tables
    std::optional<CudaPrefill> prefill = std::nullopt;  // none: DefaultCudaPrefill
  };

  // Errors are CudaAttentionWorkspace::Create's.
  static absl::StatusOr<std::unique_ptr<CudaBackend>> Create(const Options& options,
                                                             CudaStream stream);

  std::string name() const override { return "cuda"; }
  const AttentionCapabilities& capabilities() const override { return CudaAttentionCapabilities(); }
  // InvalidArgument also for a batch larger than the options. The batch is on its way to the device
  // when it returns; the metadata of an earlier step is no longer valid.
  absl::StatusOr<std::unique_ptr<AttentionMetadata>> BuildMetadata(
      const AttentionBatch& batch, int64_t block_size) const override;
  // Keys and values of any dtype.
  void WriteKv(const MatrixView& keys, const MatrixView& values, std::span<const int64_t> slots,
               const KvCacheView& cache) const override;
  // query and out have the cache's dtype, or any beside an fp8 cache.
  void Forward(const AttentionGeometry& geometry, const AttentionMetadata& metadata,
               const MatrixView& query, const KvCacheView& cache,
               const MatrixView& out) const override;

  // The first error of WriteKv or Forward, whose results are then not valid.
  absl::Status status() const { return status_; }

 private:
  CudaBackend() = default;
  absl::Status Upload(const AttentionBatch& batch, int64_t block_size) const;
  absl::Status RunForward(const AttentionGeometry& geometry, const CudaAttentionBatch& batch,
                          const MatrixView& query, const KvCacheView& cache,
                          const MatrixView& out) const;
  void Keep(const absl::Status& status) const;

  Options options_;
  int64_t max_blocks_ = 0;  // a row of block_tables_
  CudaStream stream_ = nullptr;
  mutable CudaAttentionWorkspace workspace_;
  DeviceBuffer query_start_loc_;  // i32 [max_num_requests + 1]
  DeviceBuffer seq_lens_;         // i32 [max_num_requests]
  DeviceBuffer block_tables_;     // i32 [max_num_requests, max_blocks_]
  DeviceBuffer slots_;            // i64 [max_num_tokens]
  mutable absl::Status status_;
};

}  // namespace lockstep
