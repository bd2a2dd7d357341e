// Attention of a single new token, as a part of a kernel that makes a whole decode step (model/
// cuda_row_step.h): what a block attends to, and how it comes into shared memory. See
// cuda_row_attention.cuh.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "attention/cuda_kernels.h"
#include "attention/cuda_row_words.cuh"
#include "attention/cuda_tensor_core.cuh"

namespace lockstep {

inline constexpr int kRowThreads = 480;
inline constexpr int kRowWarps = kRowThreads / 32;
inline constexpr int kRowTileKeys = 48;
inline constexpr int kMaxRowSplits = 32;        // a lane each
inline constexpr int kMaxRowGroup = kRowWarps;  // query heads of a KV head: a warp each
inline constexpr int kRowHeads = 16;            // of a tile of queries
inline constexpr int kMaxRowHeadDim = 256;      // multiples of 8
inline constexpr int kMaxRowKvHeads = 128;

// Of all layers. Device memory.
struct RowAttentionParams {
  const uint32_t* qkv;  // words [(Hq + 2 * Hkv) * D]
  uint32_t* attended;   // words [Hq * D]
  RowFloats* partials;  // [Hq, kMaxRowSplits, D / 2]
  RowFloats* stats;     // [Hq, kMaxRowSplits]: largest logit (log2), sum of weights
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

// Rows of D in shared memory, padded to a multiple of 16 elements. Where a row is a multiple of 128
// bytes, its 16-byte pieces ("chunks") are permuted by the row's number, else rows are an odd
// number of chunks apart; both put the same columns of 8 rows into different banks.
struct RowLayout {
  int chunks;      // of D
  int all_chunks;  // with the padding, zeros
  int stride;      // chunks between rows
  bool permuted;

  __host__ __device__ explicit RowLayout(int head_dim)
      : chunks(head_dim / 8),
        all_chunks((head_dim + 15) / 16 * 2),
        stride(all_chunks % 8 == 0 ? all_chunks : all_chunks + 1),
        permuted(all_chunks % 8 == 0) {}
  // Number of a row's chunk, from row 0 on.
  __device__ __forceinline__ int Chunk(int row, int chunk) const {
    return row * stride + (permuted ? chunk ^ (row % 8) : chunk);
  }
  __device__ __forceinline__ int Element(int row, int dim) const {
    return Chunk(row, dim / 8) * 8 + dim % 8;
  }
};

// The kernel's shared memory, from its beginning.
extern __shared__ __align__(128) char row_shared_memory[];
// The same pointer; the compiler learns that it points to shared memory, where it came out of
// memory and would be followed by slower, generic accesses.
template <typename T>
__device__ __forceinline__ T* AsShared(T* p) {
  return reinterpret_cast<T*>(row_shared_memory +
                              (SharedAddress(p) - SharedAddress(row_shared_memory)));
}

// The shared memory of a block. The tile and the new rows stay from before the queries are known;
// the rest is used behind it alone, and may lie where the products before it have theirs.
template <typename T>
struct RowAttentionMemory {
  static constexpr int kLogitStride = kRowTileKeys + 4;
  static constexpr int kWeightStride = kRowTileKeys + 8;  // an odd number of 16 bytes

  RowLayout layout;
  T* keys;        // [48, D]
  T* values;      // [48, D]
  T* new_rows;    // [2, D] the new key and value, if they belong to a later tile than the first
  T* query;       // [16, D]
  T* weights;     // [16, kWeightStride]
  float* logits;  // [G, kLogitStride]
  float* shrink;  // [16] what earlier tiles' results are multiplied by

  __device__ RowAttentionMemory(char* tile, char* scratch, int group, int head_dim)
      : layout(head_dim) {
    const int row = layout.stride * 8;
    keys = reinterpret_cast<T*>(tile);
    values = keys + kRowTileKeys * row;
    new_rows = values + kRowTileKeys * row;
    query = reinterpret_cast<T*>(scratch);
    weights = query + kRowHeads * row;
    logits = reinterpret_cast<float*>(weights + kRowHeads * kWeightStride);
    shrink = logits + group * kLogitStride;
  }
  // See the function of this name.
  __device__ __forceinline__ RowAttentionMemory AsShared() const {
    RowAttentionMemory memory = *this;
    memory.keys = lockstep::AsShared(keys);
    memory.values = lockstep::AsShared(values);
    memory.new_rows = lockstep::AsShared(new_rows);
    memory.query = lockstep::AsShared(query);
    memory.weights = lockstep::AsShared(weights);
    memory.logits = lockstep::AsShared(logits);
    memory.shrink = lockstep::AsShared(shrink);
    return memory;
  }
  __host__ __device__ static constexpr int64_t TileBytes(int64_t head_dim) {
    const int64_t all = (head_dim + 15) / 16 * 2;
    return (2 * kRowTileKeys + 2) * (all % 8 == 0 ? all : all + 1) * 16;
  }
  __host__ __device__ static constexpr int64_t ScratchBytes(int64_t group, int64_t head_dim) {
    const int64_t row_bytes = TileBytes(head_dim) / (2 * kRowTileKeys + 2);
    return kRowHeads * (row_bytes + kWeightStride * 2 + 4) + group * kLogitStride * 4;
  }
};

__device__ __forceinline__ void RowThreadsMeet() {
  asm volatile("bar.sync 1, %0;" ::"n"(kRowThreads) : "memory");
}

// All threads: until it is time to look for the exchange's words.
__device__ __forceinline__ void RowThreadsAwait(const RowExchange& exchange) {
  if (threadIdx.x == 0) WaitForRowArrivals(exchange);
  RowThreadsMeet();
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
  // Of the new key, from the first of the tile at `tile` on; none there: outside [0, 48).
  __device__ __forceinline__ int Newest(const RowPosition& now, int tile) const {
    return end == now.seq_len ? now.seq_len - 1 - tile : -1;
  }
};

// One warp: a head of qkv, as it comes from other blocks, into a row of shared memory.
template <typename T>
__device__ __forceinline__ float TakeRowHead(const RowAttentionParams& p, int head,
                                             const RowExchange& exchange, int lane,
                                             const RowLayout& layout, T* rows, int row) {
  constexpr int kWords = kMaxRowHeadDim / 32;
  const uint32_t* const from = p.qkv + head * p.head_dim;
  uint32_t words[kWords];
  const auto load = [&] {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if (lane + 32 * i < p.head_dim) words[i] = LoadRowWord(from + lane + 32 * i);
    }
  };
  const auto has = [&] {
    bool all = true;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      all = all && (lane + 32 * i >= p.head_dim || IsOf(exchange, words[i]));
    }
    return all;
  };
  load();
  WarpWaits(exchange, has, load);
  float squares = 0;
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    const int dim = lane + 32 * i;
    if (dim >= p.head_dim) continue;
    const T x = RowValue<T>(words[i]);
    rows[layout.Element(row, dim)] = x;
    squares = fmaf(AsFloat(x), AsFloat(x), squares);
  }
  __syncwarp();
  return squares;
}

// One warp: a head of qkv, normed and rotated, rounded to T.
template <typename T>
__device__ __forceinline__ void TurnRowHead(const RowAttentionParams& p, const RowPosition& now,
                                            int head, const float* norm,
                                            const RowExchange& exchange, int lane,
                                            const RowLayout& layout, T* rows, int row) {
  constexpr int kPairs = kMaxRowHeadDim / 64;
  float cos[kPairs], sin[kPairs];
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const int dim = lane + 32 * i;
    if (dim >= p.half) continue;
    cos[i] = p.cos[now.angles + dim];
    sin[i] = p.sin[now.angles + dim];
  }
  float squares = TakeRowHead(p, head, exchange, lane, layout, rows, row);
  float scale = 1;
  if (norm != nullptr) {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) squares += __shfl_xor_sync(~0u, squares, lanes);
    scale = 1.0f / sqrtf(squares / static_cast<float>(p.head_dim) + p.norm_eps);
  }
  const auto normed = [&](int dim) {
    const float x = AsFloat(rows[layout.Element(row, dim)]);
    return norm == nullptr ? x : x * (scale * norm[dim]);
  };
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const int dim = lane + 32 * i;
    if (dim >= p.half) continue;
    const float a = normed(dim), b = normed(dim + p.half);
    rows[layout.Element(row, dim)] = FromFloat<T>(a * cos[i] - b * sin[i]);
    rows[layout.Element(row, dim + p.half)] = FromFloat<T>(b * cos[i] + a * sin[i]);
  }
  if (norm == nullptr) return;
  for (int dim = 2 * p.half + lane; dim < p.head_dim; dim += 32) {
    rows[layout.Element(row, dim)] = FromFloat<T>(normed(dim));
  }
}

// Queries of the item's heads; the new key and value, where the item has them, also to the cache.
// Then the threads must meet.
template <typename T>
__device__ __forceinline__ void PrepareRowItem(const RowAttentionParams& p, const RowPosition& now,
                                               const RowAttentionLayer& layer, const RowItem& item,
                                               const RowExchange& exchange,
                                               const RowAttentionMemory<T>& memory) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const RowLayout layout = memory.layout;
  const int first = p.first_head[item.kv_head];
  const int group = p.first_head[item.kv_head + 1] - first;
  const int newest = item.Newest(now, item.begin);
  const bool in_first_tile = newest < kRowTileKeys;
  for (int job = warp; job < group + (newest >= 0 ? 2 : 0); job += kRowWarps) {
    if (job < group) {
      TurnRowHead(p, now, first + job, layer.q_norm, exchange, lane, layout, memory.query, job);
      // Padding of rows takes part in the products.
      if (layout.chunks < layout.all_chunks && lane < 8) {
        memory.query[layout.Element(job, p.head_dim + lane)] = FromFloat<T>(0);
      }
      continue;
    }
    const bool is_key = job == group;
    T* const rows = !in_first_tile ? memory.new_rows : is_key ? memory.keys : memory.values;
    const int row = in_first_tile ? newest : is_key ? 0 : 1;
    if (is_key) {
      TurnRowHead(p, now, p.num_query_heads + item.kv_head, layer.k_norm, exchange, lane, layout,
                  rows, row);
    } else {
      TakeRowHead(p, p.num_query_heads + p.num_kv_heads + item.kv_head, exchange, lane, layout,
                  rows, row);
    }
    __syncwarp();
    if (now.slot < 0 || lane >= layout.chunks) continue;
    const int64_t block = now.slot / p.block_size;
    const int64_t cache_row =
        (block * p.num_kv_heads + item.kv_head) * p.block_size + (now.slot - block * p.block_size);
    T* const cache = static_cast<T*>(is_key ? layer.keys : layer.values);
    *reinterpret_cast<uint4*>(cache + cache_row * p.head_dim + lane * 8) =
        reinterpret_cast<const uint4*>(rows)[layout.Chunk(row, lane)];
  }
}

// Keys or values of the tile at `begin`, or both, from the cache to shared memory, beside the
// threads: a group of copies. Rows that are not visible become zero; the new one's place is left
// alone.
template <bool kKeys, bool kValues, typename T>
__device__ __forceinline__ void LoadRowTile(const RowAttentionParams& p, const RowPosition& now,
                                            const void* keys, const void* values,
                                            const RowItem& item, int begin,
                                            const RowAttentionMemory<T>& memory) {
  constexpr int kTurns = 2;  // whose look into the block table is made together
  const RowLayout layout = memory.layout;
  const int end = min(min(begin + kRowTileKeys, item.end), now.seq_len - 1);
  const int newest = item.Newest(now, begin);
  const int count = kRowTileKeys * layout.all_chunks;
  for (int first = threadIdx.x; first < count; first += kTurns * kRowThreads) {
    int64_t from[kTurns];  // -1: nothing is there
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const int at = first + turn * kRowThreads;
      const int row = at / layout.all_chunks, chunk = at - row * layout.all_chunks;
      const int key = begin + row;
      from[turn] = -1;
      if (at >= count || key >= end || chunk >= layout.chunks) continue;
      const int block = p.block_shift >= 0 ? key >> p.block_shift : key / p.block_size;
      const int64_t cache_row =
          (int64_t{now.table[block]} * p.num_kv_heads + item.kv_head) * p.block_size +
          (key - block * p.block_size);
      from[turn] = cache_row * p.head_dim + chunk * 8;
    }
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const int at = first + turn * kRowThreads;
      const int row = at / layout.all_chunks, chunk = at - row * layout.all_chunks;
      if (at >= count || (row == newest && chunk < layout.chunks)) continue;
      const bool valid = from[turn] >= 0;
      const int64_t offset = valid ? from[turn] : 0;
      const int to = layout.Chunk(row, chunk) * 8;
      if (kKeys) {
        CopyAsync16(SharedAddress(memory.keys + to), static_cast<const T*>(keys) + offset, valid);
      }
      if (kValues) {
        CopyAsync16(SharedAddress(memory.values + to), static_cast<const T*>(values) + offset,
                    valid);
      }
    }
  }
  CommitCopies();
}

// What the queries wait for beside: the first tile's keys and values.
template <typename T>
__device__ __forceinline__ void LoadFirstRowTile(const RowAttentionParams& p,
                                                 const RowPosition& now, const void* keys,
                                                 const void* values, const RowItem& item,
                                                 const RowAttentionMemory<T>& memory) {
  LoadRowTile<true, true>(p, now, keys, values, item, item.begin, memory);
  CommitCopies();  // of nothing: in AttendRowItem the last group is that of the values
}

}  // namespace lockstep
