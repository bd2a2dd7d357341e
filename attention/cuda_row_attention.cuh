// Attention of a single new token, as a part of a kernel that makes a whole decode step (model/
// cuda_row_step.h): what one block does. 480 threads, some of the request's keys for one KV head.
//
// The visible keys are cut into at most kMaxRowSplits parts of whole tiles of 60, by their number
// and the size of the grid alone. A part's result is not divided by its sum of weights; whoever
// reads the result merges the parts (MergedRowVector).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "attention/cuda_kernels.h"

namespace lockstep {

inline constexpr int kRowThreads = 480;
inline constexpr int kRowWarps = kRowThreads / 32;
inline constexpr int kRowTileKeys = kRowThreads / 8;
inline constexpr int kRowWeights = 64;  // of a head; those beyond the tile are zero
inline constexpr int kMaxRowSplits = 16;
inline constexpr int kMaxRowGroup = kRowWarps;  // query heads of a KV head: a warp each
inline constexpr int kRowShrinks = 16;          // at least kMaxRowGroup, a multiple of 16 bytes
inline constexpr int kMaxRowHeadDim = 256;      // multiples of 8
inline constexpr int kMaxRowKvHeads = 128;

// Of all layers. Device memory.
struct RowAttentionParams {
  const void* qkv;  // [(Hq + 2 * Hkv) * D]
  float* partials;  // [Hq, kMaxRowSplits, D]
  float* stats;     // [Hq, kMaxRowSplits, 2]: largest logit (log2), sum of weights
  int32_t num_query_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t half;      // R/2
  const float* cos;  // [.., R/2]
  const float* sin;
  const int32_t* angle_row;  // null: row 0
  float norm_eps;
  const int32_t* seq_len;       // tokens visible after this step's write; 0: nothing to do
  const int32_t* block_tables;  // [tables, max_blocks]
  const int32_t* table_row;
  const int64_t* slot;  // kNoSlot: the new key and value go nowhere
  int64_t max_blocks;
  int32_t block_size;
  int32_t block_shift;  // log2 of it, -1: no power of two
  LogitScale scale;
  int16_t first_head[kMaxRowKvHeads + 1];  // of each KV head, then Hq
};

struct RowAttentionLayer {
  const float* q_norm;  // null: none
  const float* k_norm;
  void* keys;
  void* values;
  int32_t window;  // 0: none
};

// What a step's layers share, read once.
struct RowPosition {
  int32_t seq_len;
  int64_t slot;
  int64_t angles;        // of cos and sin
  const int32_t* table;  // the request's block table

  __device__ explicit RowPosition(const RowAttentionParams& p)
      : seq_len(*p.seq_len),
        slot(*p.slot),
        angles(int64_t{p.angle_row == nullptr ? 0 : *p.angle_row} * p.half),
        table(p.block_tables + *p.table_row * p.max_blocks) {}
};

// The visible keys [begin, seq_len) in num_splits parts of split_keys.
struct RowSplits {
  int32_t begin;
  int32_t end;
  int32_t split_keys;
  int32_t num_splits;

  __device__ RowSplits(const RowAttentionParams& p, const RowPosition& now, int32_t window,
                       int grid) {
    end = now.seq_len;
    begin = window > 0 ? max(0, end - window) : 0;
    const int tiles = (end - begin + kRowTileKeys - 1) / kRowTileKeys;
    const int most = max(1, min(kMaxRowSplits, grid / p.num_kv_heads));
    const int tiles_each = max(1, (tiles + most - 1) / most);
    split_keys = tiles_each * kRowTileKeys;
    num_splits = (tiles + tiles_each - 1) / tiles_each;
  }
};

// The shared memory of a block; bytes for a largest group of G heads.
template <typename T>
struct RowAttentionMemory {
  float* query;    // [G, D]
  float* weights;  // [G, kRowWeights] logits, then weights
  float* shrink;   // [G] what earlier tiles' results are multiplied by
  T* values;       // [60, D]
  T* new_key;      // [D]
  T* new_value;

  __device__ RowAttentionMemory(char* at, int group, int head_dim) {
    query = reinterpret_cast<float*>(at);
    weights = query + group * head_dim;
    shrink = weights + group * kRowWeights;
    values = reinterpret_cast<T*>(shrink + kRowShrinks);
    new_key = values + kRowTileKeys * head_dim;
    new_value = new_key + head_dim;
  }
  static constexpr int64_t Bytes(int64_t group, int64_t head_dim) {
    return (group * (head_dim + kRowWeights) + kRowShrinks) * 4 +
           (kRowTileKeys + 2) * head_dim * static_cast<int64_t>(sizeof(T));
  }
};

__device__ __forceinline__ void RowThreadsMeet() {
  asm volatile("bar.sync 1, %0;" ::"n"(kRowThreads) : "memory");
}
__device__ __forceinline__ float RowWiden(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float RowWiden(__half x) { return __half2float(x); }
template <typename T>
__device__ __forceinline__ T RowNarrow(float x);
template <>
__device__ __forceinline__ __nv_bfloat16 RowNarrow(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ __forceinline__ __half RowNarrow(float x) {
  return __float2half_rn(x);
}

// A block's part of the step: keys [begin, end) of KV head `kv_head`.
struct RowItem {
  int32_t kv_head;
  int32_t split;
  int32_t begin;
  int32_t end;

  __device__ RowItem(const RowSplits& splits, int item) {
    kv_head = item / splits.num_splits;
    split = item - kv_head * splits.num_splits;
    begin = splits.begin + split * splits.split_keys;
    end = min(begin + splits.split_keys, splits.end);
  }
};

// One warp: norm and rotation of a head of qkv (another block wrote it), rounded to T.
template <typename T, typename Store>
__device__ __forceinline__ void TurnRowHead(const RowAttentionParams& p, const RowPosition& now,
                                            int head, const float* norm, int lane, Store store) {
  const T* from = static_cast<const T*>(p.qkv) + head * p.head_dim;
  const auto load = [&](int dim) { return RowWiden(__ldcg(from + dim)); };
  float scale = 1;
  if (norm != nullptr) {
    float squares = 0;
    for (int dim = lane; dim < p.head_dim; dim += 32) squares += load(dim) * load(dim);
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) squares += __shfl_xor_sync(~0u, squares, lanes);
    scale = 1.0f / sqrtf(squares / static_cast<float>(p.head_dim) + p.norm_eps);
  }
  const auto normed = [&](int dim) {
    return norm == nullptr ? load(dim) : load(dim) * (scale * norm[dim]);
  };
  // All of a lane's loads are on their way together.
  constexpr int kPairs = kMaxRowHeadDim / 64;
  float a[kPairs], b[kPairs], cos[kPairs], sin[kPairs];
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const int dim = lane + 32 * i;
    if (dim >= p.half) continue;
    a[i] = normed(dim);
    b[i] = normed(dim + p.half);
    cos[i] = p.cos[now.angles + dim];
    sin[i] = p.sin[now.angles + dim];
  }
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const int dim = lane + 32 * i;
    if (dim >= p.half) continue;
    store(dim, RowNarrow<T>(a[i] * cos[i] - b[i] * sin[i]));
    store(dim + p.half, RowNarrow<T>(b[i] * cos[i] + a[i] * sin[i]));
  }
  for (int dim = 2 * p.half + lane; dim < p.head_dim; dim += 32) {
    store(dim, RowNarrow<T>(normed(dim)));
  }
}

// Queries of the item's heads; the new key and value, where the item has them, also to the cache.
template <typename T>
__device__ __forceinline__ void PrepareRowItem(const RowAttentionParams& p, const RowPosition& now,
                                               const RowAttentionLayer& layer, const RowItem& item,
                                               const RowAttentionMemory<T>& memory) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first = p.first_head[item.kv_head];
  const int group = p.first_head[item.kv_head + 1] - first;
  const bool has_new = item.end == now.seq_len && item.end > item.begin;
  const int64_t slot = now.slot;
  const int64_t block = slot / p.block_size;
  const int64_t cache_row = slot < 0 ? -1
                                     : (block * p.num_kv_heads + item.kv_head) * p.block_size +
                                           (slot - block * p.block_size);
  const auto to_cache = [&](void* cache, int dim, T x) {
    if (cache_row >= 0) static_cast<T*>(cache)[cache_row * p.head_dim + dim] = x;
  };
  for (int job = warp; job < group + (has_new ? 2 : 0); job += kRowWarps) {
    if (job < group) {
      TurnRowHead<T>(p, now, first + job, layer.q_norm, lane,
                     [&](int dim, T x) { memory.query[job * p.head_dim + dim] = RowWiden(x); });
    } else if (job == group) {
      TurnRowHead<T>(p, now, p.num_query_heads + item.kv_head, layer.k_norm, lane,
                     [&](int dim, T x) {
                       memory.new_key[dim] = x;
                       to_cache(layer.keys, dim, x);
                     });
    } else {
      const T* from = static_cast<const T*>(p.qkv) +
                      (p.num_query_heads + p.num_kv_heads + item.kv_head) * p.head_dim;
      for (int dim = lane; dim < p.head_dim; dim += 32) {
        const T x = __ldcg(from + dim);
        memory.new_value[dim] = x;
        to_cache(layer.values, dim, x);
      }
    }
  }
}

// 16 bytes, or zeros where `valid` is false, beside the threads.
__device__ __forceinline__ void RowCopyAsync(void* to_shared, const void* from, bool valid) {
  const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(to_shared));
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
               : "memory");
}

// A tile of keys and values on its way from the cache: keys to registers, values to shared
// memory, 16 bytes ("chunks") of D at a time. A group of 8 lanes has a key, each of them every
// eighth chunk; thread i copies chunks i, i + 480, .. of the values. What is not visible, or new in
// this step, is zero.
template <typename T>
struct RowTile {
  static constexpr int kChunks = kMaxRowHeadDim / 64;
  uint4 key[kChunks];

  static __device__ __forceinline__ int64_t CacheRow(const RowAttentionParams& p,
                                                     const RowPosition& now, int kv_head, int key) {
    const int block = p.block_shift >= 0 ? key >> p.block_shift : key / p.block_size;
    return (int64_t{now.table[block]} * p.num_kv_heads + kv_head) * p.block_size +
           (key - block * p.block_size);
  }
  // Nobody reads the values of an earlier tile any more.
  __device__ __forceinline__ void Load(const RowAttentionParams& p, const RowPosition& now,
                                       const RowAttentionLayer& layer, const RowItem& item,
                                       int begin, const RowAttentionMemory<T>& memory) {
    const int end = min(min(begin + kRowTileKeys, item.end), now.seq_len - 1);
    const int chunks = p.head_dim / 8;
    const int my_key = begin + static_cast<int>(threadIdx.x) / 8;
    const T* keys = static_cast<const T*>(layer.keys);
    if (my_key < end) keys += CacheRow(p, now, item.kv_head, my_key) * p.head_dim;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const int chunk = static_cast<int>(threadIdx.x) % 8 + 8 * i;
      key[i] = my_key < end && chunk < chunks ? *reinterpret_cast<const uint4*>(keys + chunk * 8)
                                              : uint4{};
    }
    for (int at = threadIdx.x; at < kRowTileKeys * chunks; at += kRowThreads) {
      const int value_key = begin + at / chunks;
      const bool valid = value_key < end;
      const T* from = static_cast<const T*>(layer.values);
      if (valid) {
        from += CacheRow(p, now, item.kv_head, value_key) * p.head_dim + at % chunks * 8;
      }
      RowCopyAsync(memory.values + at * 8, from, valid);
    }
  }
  // The copies have landed, and the new key and value are in their places. Then the threads must
  // meet before they read the values.
  __device__ __forceinline__ void Complete(const RowAttentionParams& p, const RowPosition& now,
                                           const RowItem& item, int begin,
                                           const RowAttentionMemory<T>& memory) {
    asm volatile("cp.async.wait_all;" ::: "memory");
    const int newest = now.seq_len - 1 - begin;  // within the tile, or beyond it
    const int chunks = p.head_dim / 8;
    if (newest >= kRowTileKeys || item.end != now.seq_len) return;
    if (static_cast<int>(threadIdx.x) / 8 == newest) {
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        const int chunk = static_cast<int>(threadIdx.x) % 8 + 8 * i;
        if (chunk < chunks) key[i] = *reinterpret_cast<const uint4*>(memory.new_key + chunk * 8);
      }
    }
    // By who copied zeros there.
    const int first = newest * chunks;
    for (int at = threadIdx.x; at < first + chunks; at += kRowThreads) {
      if (at < first) continue;
      *reinterpret_cast<uint4*>(memory.values + at * 8) =
          *reinterpret_cast<const uint4*>(memory.new_value + (at - first) * 8);
    }
  }
};

// Logits of the tile's keys for all heads of the group, into memory.weights.
template <typename T>
__device__ __forceinline__ void RowLogits(const RowAttentionParams& p, int group, int num_keys,
                                          const RowTile<T>& tile,
                                          const RowAttentionMemory<T>& memory) {
  const int part = threadIdx.x % 8, key = threadIdx.x / 8;
#pragma unroll 2
  for (int g = 0; g < group; ++g) {
    const float* query = memory.query + g * p.head_dim;
    float sum = 0;
#pragma unroll
    for (int i = 0; i < RowTile<T>::kChunks; ++i) {
      const int chunk = part + 8 * i;
      if (chunk * 8 >= p.head_dim) continue;
      const T* k = reinterpret_cast<const T*>(&tile.key[i]);
      const float4 low = *reinterpret_cast<const float4*>(query + chunk * 8);
      const float4 high = *reinterpret_cast<const float4*>(query + chunk * 8 + 4);
      sum = fmaf(low.x, RowWiden(k[0]), sum);
      sum = fmaf(low.y, RowWiden(k[1]), sum);
      sum = fmaf(low.z, RowWiden(k[2]), sum);
      sum = fmaf(low.w, RowWiden(k[3]), sum);
      sum = fmaf(high.x, RowWiden(k[4]), sum);
      sum = fmaf(high.y, RowWiden(k[5]), sum);
      sum = fmaf(high.z, RowWiden(k[6]), sum);
      sum = fmaf(high.w, RowWiden(k[7]), sum);
    }
#pragma unroll
    for (int lanes = 4; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
    float logit = sum * p.scale.factor;
    // tanh(y / (2 log2(e))) = 1 - 2 / (1 + 2^y): see LogitScale.
    if (p.scale.cap_output != 0) {
      logit = p.scale.cap_output * (1.0f - 2.0f / (1.0f + exp2f(sum * p.scale.cap_input)));
    }
    if (part == 0) memory.weights[g * kRowWeights + key] = key < num_keys ? logit : -INFINITY;
  }
}

// acc += weight * v[0, 2).
template <typename T>
__device__ __forceinline__ void AddRowValue(float weight, const T* v, float2& acc) {
  const uint32_t bits = *reinterpret_cast<const uint32_t*>(v);
  const T* pair = reinterpret_cast<const T*>(&bits);
  acc.x = fmaf(weight, RowWiden(pair[0]), acc.x);
  acc.y = fmaf(weight, RowWiden(pair[1]), acc.y);
}

// All tiles of an item; its partial result.
template <typename T>
__device__ __forceinline__ void AttendRowItem(const RowAttentionParams& p, const RowPosition& now,
                                              const RowAttentionLayer& layer, const RowItem& item,
                                              RowTile<T>& tile,
                                              const RowAttentionMemory<T>& memory) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first = p.first_head[item.kv_head];
  const int group = p.first_head[item.kv_head + 1] - first;
  // Softmax: warp g has head g. Values: a thread has two columns of every `head_step`-th head.
  const int pairs = p.head_dim / 2;
  const int head_step = kRowThreads / pairs;
  const int pair = static_cast<int>(threadIdx.x) % pairs;
  const int my_head = static_cast<int>(threadIdx.x) / pairs;
  constexpr int kHeads = kMaxRowGroup / (kRowThreads / (kMaxRowHeadDim / 2));
  float2 acc[kHeads] = {};
  float largest = -INFINITY, sum = 0;
  PrepareRowItem(p, now, layer, item, memory);
  RowThreadsMeet();
  for (int begin = item.begin; begin < item.end; begin += kRowTileKeys) {
    if (begin != item.begin) tile.Load(p, now, layer, item, begin, memory);
    tile.Complete(p, now, item, begin, memory);
    RowLogits(p, group, item.end - begin, tile, memory);
    RowThreadsMeet();
    if (warp < group) {
      float2* const weights = reinterpret_cast<float2*>(memory.weights + warp * kRowWeights) + lane;
      float2 x = lane < kRowTileKeys / 2 ? *weights : float2{-INFINITY, -INFINITY};
      float top = fmaxf(largest, fmaxf(x.x, x.y));
#pragma unroll
      for (int lanes = 16; lanes > 0; lanes /= 2) {
        top = fmaxf(top, __shfl_xor_sync(~0u, top, lanes));
      }
      const float offset = top == -INFINITY ? 0.0f : top;
      const float shrink = exp2f(largest - offset);
      x = make_float2(exp2f(x.x - offset), exp2f(x.y - offset));
      float added = x.x + x.y;
#pragma unroll
      for (int lanes = 16; lanes > 0; lanes /= 2) added += __shfl_xor_sync(~0u, added, lanes);
      sum = sum * shrink + added;
      largest = top;
      *weights = x;
      if (lane == 0) memory.shrink[warp] = shrink;
    }
    RowThreadsMeet();
    if (my_head < head_step) {
#pragma unroll
      for (int i = 0; i < kHeads; ++i) {
        const int g = my_head + i * head_step;
        if (g >= group) continue;
        acc[i].x *= memory.shrink[g];
        acc[i].y *= memory.shrink[g];
#pragma unroll 4
        for (int key = 0; key < kRowTileKeys; key += 4) {
          const float4 weights =
              *reinterpret_cast<const float4*>(memory.weights + g * kRowWeights + key);
          const T* v = memory.values + key * p.head_dim + 2 * pair;
          AddRowValue(weights.x, v, acc[i]);
          AddRowValue(weights.y, v + p.head_dim, acc[i]);
          AddRowValue(weights.z, v + 2 * p.head_dim, acc[i]);
          AddRowValue(weights.w, v + 3 * p.head_dim, acc[i]);
        }
      }
    }
    RowThreadsMeet();  // before the next tile's values
  }
  if (warp < group && lane == 0) {
    float* stats = p.stats + ((first + warp) * kMaxRowSplits + item.split) * 2;
    *reinterpret_cast<float2*>(stats) = make_float2(largest, sum);
  }
  if (my_head >= head_step) return;
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    const int g = my_head + i * head_step;
    if (g >= group) continue;
    float* to = p.partials + (int64_t{first + g} * kMaxRowSplits + item.split) * p.head_dim;
    *reinterpret_cast<float2*>(to + 2 * pair) = acc[i];
  }
}

// Columns [col, col + 8) of the row's result, all of one head; zeros without a visible key.
__device__ __forceinline__ void MergedRowVector(const RowAttentionParams& p, int num_splits,
                                                int col, float (&out)[8]) {
  const int head = col / p.head_dim;
  const float* stats = p.stats + head * kMaxRowSplits * 2;
  const float* partials =
      p.partials + int64_t{head} * kMaxRowSplits * p.head_dim + (col - head * p.head_dim);
  float2 stat[kMaxRowSplits];
#pragma unroll
  for (int s = 0; s < kMaxRowSplits; ++s) {
    stat[s] = s < num_splits ? __ldcg(reinterpret_cast<const float2*>(stats) + s)
                             : make_float2(-INFINITY, 0.0f);
  }
  float largest = -INFINITY;
#pragma unroll
  for (int s = 0; s < kMaxRowSplits; ++s) largest = fmaxf(largest, stat[s].x);
  const float offset = largest == -INFINITY ? 0.0f : largest;
  float total = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) out[i] = 0;
#pragma unroll
  for (int s = 0; s < kMaxRowSplits; ++s) {
    if (s >= num_splits) break;
    const float4* part = reinterpret_cast<const float4*>(partials + s * p.head_dim);
    const float4 low = __ldcg(part), high = __ldcg(part + 1);
    const float weight = exp2f(stat[s].x - offset);
    total = fmaf(stat[s].y, weight, total);
    out[0] = fmaf(low.x, weight, out[0]);
    out[1] = fmaf(low.y, weight, out[1]);
    out[2] = fmaf(low.z, weight, out[2]);
    out[3] = fmaf(low.w, weight, out[3]);
    out[4] = fmaf(high.x, weight, out[4]);
    out[5] = fmaf(high.y, weight, out[5]);
    out[6] = fmaf(high.z, weight, out[6]);
    out[7] = fmaf(high.w, weight, out[7]);
  }
  const float scale = total > 0 ? 1.0f / total : 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) out[i] *= scale;
}

}  // namespace lockstep
