// What the prefill kernels share: which rows a block has, and what they see.
#pragma once

#include "attention/cuda_device_code.cuh"

namespace lockstep {

// A row tile: rows of one request and one KV head. Queries of a KV head's group lie packed, token
// by token: row m is token m / group, head first_head + m % group. So groups of any size fill
// tiles, and a tile's tokens are close together.
struct RowTile {
  int32_t request = -1;  // -1: nothing to do
  int32_t first_row = 0;
  int32_t num_rows = 0;
  int32_t group = 0;
  int32_t first_head = 0;
  int32_t first_token = 0;     // the request's first row of the step
  int32_t first_position = 0;  // of that token
  int32_t seq_len = 0;

  __device__ int32_t Position(int32_t row) const { return first_position + row / group; }
};

// Tile numbers: request b has the numbers from query_start_loc[b] * group / kRows + b up to that of
// b + 1, which is enough for its rows, and some may be empty. So nothing but query_start_loc is
// needed to find the request of a tile, and T * group / kRows + B numbers are enough for all.
// A warp's: all lanes get it.
template <int kRows>
__device__ RowTile FindRowTile(const PrefillParams& p, int32_t tile, int32_t kv_head) {
  RowTile result;
  result.first_head = p.first_head[kv_head];
  result.group = p.first_head[kv_head + 1] - result.first_head;
  const auto first_tile = [&](int32_t b) {
    return static_cast<int32_t>(int64_t{p.query_start_loc[b]} * result.group / kRows) + b;
  };
  int32_t found = -1;
  for (int32_t b = static_cast<int32_t>(threadIdx.x) % 32; b < p.num_requests; b += 32) {
    if (first_tile(b) <= tile && tile < first_tile(b + 1)) found = b;
  }
  const int32_t b = __reduce_max_sync(kFullWarp, found);
  if (b < 0) return result;
  result.first_token = p.query_start_loc[b];
  const int32_t query_len = p.query_start_loc[b + 1] - result.first_token;
  result.seq_len = p.seq_lens[b];
  result.first_position = result.seq_len - query_len;
  result.first_row = (tile - first_tile(b)) * kRows;
  result.num_rows = min(kRows, query_len * result.group - result.first_row);
  // One row is decode's; see CudaAttentionBatch for length 0.
  if (query_len > 1 && result.num_rows > 0) result.request = b;
  return result;
}

inline __device__ int32_t LowestVisible(int32_t position, int32_t window) {
  return window > 0 && position >= window ? position - window + 1 : 0;
}

// The keys a row tile's rows see, as tiles of kKeys at multiples of kKeys.
struct KeyRange {
  int32_t begin;  // visible to some row
  int32_t end;
  int32_t first_tile;  // begin, rounded down to a tile
  int32_t num_tiles;
};

template <int kKeys>
__device__ KeyRange KeysOf(const PrefillParams& p, const RowTile& tile) {
  KeyRange keys;
  keys.begin = LowestVisible(tile.Position(tile.first_row), p.window);
  keys.end = tile.Position(tile.first_row + tile.num_rows - 1) + 1;
  keys.first_tile = keys.begin / kKeys * kKeys;
  keys.num_tiles = (keys.end - keys.first_tile + kKeys - 1) / kKeys;
  return keys;
}

// Cache row of key `thread` of tile i; -1 where no row sees it or there is no such key.
template <int kKeys>
__device__ int32_t CacheRow(const PrefillParams& p, const KeyRange& keys, const int32_t* table,
                            int32_t kv_head, int32_t i, int thread) {
  const int32_t key = keys.first_tile + i * kKeys + thread;
  if (thread >= kKeys || key < keys.begin || key >= keys.end) return -1;
  return RowIndex(p.kv, table, key, kv_head);
}

inline __device__ const int32_t* TableOf(const PrefillParams& p, const RowTile& tile) {
  const int64_t row = p.table_rows != nullptr ? p.table_rows[tile.request] : tile.request;
  return p.kv.block_tables + row * p.kv.max_blocks;
}

// Where row `row` of the tile is in rows `stride` elements apart of head_dim wide heads.
inline __device__ int64_t RowOffset(const PrefillParams& p, const RowTile& tile, int32_t row,
                                    int64_t stride) {
  const int32_t packed = tile.first_row + row;
  return (tile.first_token + packed / tile.group) * stride +
         int64_t{tile.first_head + packed % tile.group} * p.kv.head_dim;
}

// Whether one of rows [first_row, last_row] of the tile does not see one of the keys.
template <int kKeys>
__device__ bool NeedsMask(const PrefillParams& p, const RowTile& tile, int32_t first_row,
                          int32_t last_row, int32_t first_key) {
  return first_key + kKeys - 1 > tile.Position(tile.first_row + first_row) ||
         first_key < LowestVisible(tile.Position(tile.first_row + last_row), p.window);
}

// Rows g and g + 8 of a tile of 16, of which this lane has the columns of a C fragment.
struct SoftmaxRows {
  int32_t position[2];
  float max[2] = {-INFINITY, -INFINITY};  // of products or capped logits
  float sum[2] = {0, 0};                  // this lane's columns only
  float shrink[2];                        // what the last tile's keys shrink weighted values by

  // Multiplying by 1 changes nothing, so leaving it out does not either. Of the warp.
  __device__ bool Shrinks() const {
    return __any_sync(kFullWarp, shrink[0] != 1.0f || shrink[1] != 1.0f) != 0;
  }
};

// Logits of row half h become weights, and the row's sum follows.
template <int kKeys>
__device__ __forceinline__ void WeighRow(int h, float factor, float offset,
                                         float (&logits)[kKeys / 8][4], SoftmaxRows& rows) {
  float sum = rows.sum[h] * rows.shrink[h];
#pragma unroll
  for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
    for (int j = 2 * h; j < 2 * h + 2; ++j) {
      logits[n][j] = Exp2(fmaf(logits[n][j], factor, -offset));
      sum += logits[n][j];
    }
  }
  rows.sum[h] = sum;
}

// Products of a tile's keys become softmax weights, by parts.
template <int kKeys>
__device__ void Softmax(const PrefillParams& p, int32_t first_key, bool masked,
                        float (&logits)[kKeys / 8][4], SoftmaxRows& rows) {
  const int lane = threadIdx.x % 32;
  const bool capped = p.scale.cap_output != 0;
  const float factor = capped ? 1.0f : p.scale.factor;
  if (capped) {
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
      for (int j = 0; j < 4; ++j) logits[n][j] = Capped(p.scale, logits[n][j]);
    }
  }
  if (masked) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int32_t position = rows.position[h];
      const int32_t lowest = LowestVisible(position, p.window);
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
        for (int j = 2 * h; j < 2 * h + 2; ++j) {
          const int32_t key = first_key + n * 8 + lane % 4 * 2 + j % 2;
          if (key < lowest || key > position) logits[n][j] = -INFINITY;
        }
      }
    }
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float max = rows.max[h];
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
      max = fmaxf(max, fmaxf(logits[n][2 * h], logits[n][2 * h + 1]));
    }
    max = fmaxf(max, __shfl_xor_sync(kFullWarp, max, 1));
    max = fmaxf(max, __shfl_xor_sync(kFullWarp, max, 2));
    const float offset = max == -INFINITY ? 0.0f : max * factor;
    rows.shrink[h] = max == rows.max[h] ? 1.0f : Exp2(fmaf(rows.max[h], factor, -offset));
    rows.max[h] = max;
    WeighRow<kKeys>(h, factor, offset, logits, rows);
  }
}

// 1 / the sum of a row, of which every lane has its columns'.
inline __device__ float InverseSum(float sum) {
  sum += __shfl_xor_sync(kFullWarp, sum, 1);
  sum += __shfl_xor_sync(kFullWarp, sum, 2);
  return __fdividef(1.0f, sum);
}

// Weights of keys 16 k to 16 k + 15 as an A fragment.
template <typename T, int kKeys>
__device__ void PackWeights(const float (&weights)[kKeys / 8][4], int k, uint32_t (&a)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float(&w)[4] = weights[2 * k + i / 2];
    a[i] = Pack<T>(w[i % 2 * 2], w[i % 2 * 2 + 1]);
  }
}

}  // namespace lockstep
