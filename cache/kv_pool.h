// The storage of a rank's paged KV cache: all layers, one allocation, made once at start.
#pragma once

#include <cstdint>

#include "cache/kv_view.h"
#include "runtime/core/buffer.h"

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

  const KvPoolShape& shape() const { return shape_; }
  int64_t num_blocks() const { return num_blocks_; }
  KvCacheView Layer(int64_t layer) const;
  // Fills a block of every layer with NaN, so that a read of a freed page shows.
  void Poison(int64_t block);
  // Copies keys and values of a block, in every layer.
  void Copy(int64_t source, int64_t target);

 private:
  KvPoolShape shape_;
  int64_t num_blocks_ = 0;
  Buffer storage_;
};

}  // namespace lockstep
