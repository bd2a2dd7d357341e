// "cpu": paged attention for the host processor, vectorised and multi-threaded; the default there.
//
// Method: softmax by parts (Milakov and Gimelshein 2018, "Online normalizer calculation for
// softmax"; FlashAttention's tiling, Dao et al. 2022). A request's keys are cut at fixed positions
// into key tiles of kKeyTile; each (row, query head, key tile) gives a partial (max, sum, weighted
// values), and the partials of a row are folded in ascending order. All query heads of a KV group
// and a tile of rows share the unpacking of a key tile, so K and V are never repeated.
//
// Why a row's bits do not depend on the batch, on chunking, or on the number of threads:
// - which keys form a tile depends on their positions only, and is the same in prefill and decode;
// - a logit is one chain of fused products over d, ascending; a weighted value one chain over the
//   visible keys, ascending; both in any register tile, so also for any number of rows beside it;
// - a row adds its own visible keys only: what its neighbours see adds an exact zero to the softmax
//   sum (a key's lane is its position) and nothing to the values;
// - partials are folded in the order of the tiles wherever they were computed. Threads split the
//   work between key tiles, never inside one.
// Bits do differ between instruction sets.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "attention/attention_backend.h"
#include "attention/cpu_kernels.h"
#include "runtime/core/thread_pool.h"

namespace lockstep {

class CpuBackend : public AttentionBackend {
 public:
  static const AttentionCapabilities& Capabilities();

  // `pool` must outlive the backend. `kernels`: one of UsableCpuKernels(), the best by default.
  static std::unique_ptr<CpuBackend> Create(ThreadPool& pool, const CpuKernels* kernels = nullptr);

  std::string name() const override { return "cpu"; }
  const AttentionCapabilities& capabilities() const override { return Capabilities(); }
  absl::StatusOr<std::unique_ptr<AttentionMetadata>> BuildMetadata(
      const AttentionBatch& batch, int64_t block_size) const override;
  void WriteKv(const MatrixView& keys, const MatrixView& values, std::span<const int64_t> slots,
               const KvCacheView& cache) const override;
  // From one thread at a time: the pool's threads share the backend's scratch memory.
  void Forward(const AttentionGeometry& geometry, const AttentionMetadata& metadata,
               const MatrixView& query, const KvCacheView& cache,
               const MatrixView& out) const override;

 private:
  CpuBackend(ThreadPool& pool, const CpuKernels& kernels);

  ThreadPool& pool_;
  const CpuKernels& kernels_;
  mutable std::vector<Buffer> scratch_;  // one a thread, and one for shared partials; only grows
};

}  // namespace lockstep
