// The KV cache of one layer as a backend sees it. Plain data: the only header of cache/ that
// attention/ includes.
#pragma once

#include <cstdint>

#include "runtime/core/dtype.h"

namespace lockstep {

// slot = block_id * block_size + offset. A slot of kNoSlot writes nothing (padding).
inline constexpr int64_t kNoSlot = -1;

// Keys and values, each [num_blocks, Hkv_local, P, D] of `dtype`, row-major without gaps: the P
// rows of one head of one block lie together, so that attention streams them.
struct KvCacheView {
  void* keys = nullptr;
  void* values = nullptr;
  DType dtype = DType::kF32;
  int64_t num_blocks = 0;
  int64_t num_kv_heads = 0;  // Hkv_local
  int64_t block_size = 0;    // P
  int64_t head_dim = 0;      // D
  // Of kF8E4M3, else 1: a key is what is stored times k_scale, a value times v_scale.
  float k_scale = 1;
  float v_scale = 1;

  // Element offset of the D-vector of (block, head, offset in block).
  int64_t Offset(int64_t block, int64_t head, int64_t offset) const {
    return ((block * num_kv_heads + head) * block_size + offset) * head_dim;
  }
};

}  // namespace lockstep
