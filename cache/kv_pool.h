// The storage of a rank's paged KV cache: all layers, one allocation, made once at start.
#pragma once

#include <cstdint>
#include <vector>

#include "cache/kv_view.h"
#include "runtime/core/buffer.h"
#include "runtime/core/cuda_device.h"

namespace lockstep {

struct KvPoolShape {
  int64_t num_layers = 0;    // L
  int64_t num_kv_heads = 0;  // Hkv_local
  int64_t head_dim = 0;      // D
  int64_t block_size = 0;    // P
  DType dtype = DType::kF32;

  // Bytes of one block over all layers, keys and values: 2 * L * Hkv_local * P * D * sizeof(dtype).
  int64_t BytesPerBlock() const {
    return 2 * num_layers * num_kv_heads * block_size * head_dim * SizeOf(dtype);
  }
};

class KvPool {
 public:
  // ResourceExhausted when the memory cannot be had; InvalidArgument for sizes below 1.
  static absl::StatusOr<KvPool> Create(const KvPoolShape& shape, int64_t num_blocks);
  // The same in the memory of the selected CUDA device; Poison and Copy then happen in the order of
  // `stream`.
  static absl::StatusOr<KvPool> CreateOnCuda(const KvPoolShape& shape, int64_t num_blocks,
                                             CudaStream stream);

  const KvPoolShape& shape() const { return shape_; }
  int64_t num_blocks() const { return num_blocks_; }
  KvCacheView Layer(int64_t layer) const;
  // Of a kF8E4M3 pool, before anything is written: the layer's k_scale and v_scale, 1 else.
  void SetScales(int64_t layer, float k_scale, float v_scale);
  // Fills a block of every layer with NaN, so that a read of a freed page shows. Fails on CUDA
  // alone.
  absl::Status Poison(int64_t block);
  // Copies keys and values of a block, in every layer. Fails on CUDA alone.
  absl::Status Copy(int64_t source, int64_t target);

 private:
  struct Scales {
    float keys = 1;
    float values = 1;
  };

  KvPoolShape shape_;
  int64_t num_blocks_ = 0;
  std::vector<Scales> scales_;  // [L]
  void* data() const { return on_cuda_ ? cuda_storage_.data() : storage_.data(); }

  bool on_cuda_ = false;
  CudaStream stream_ = nullptr;
  Buffer storage_;
  DeviceBuffer cuda_storage_;
};

}  // namespace lockstep
