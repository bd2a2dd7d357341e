// Attention of a single new token, as a part of a kernel that makes a whole decode step (model/
// cuda_row_step.h): what one block does. 480 threads, some of the request's keys for one KV head.
//
// The visible keys are cut into at most kMaxRowSplits parts of whole tiles of 48, by their number
// and the size of the grid alone. A part's result is not divided by its sum of weights; it is
// handed over in words that say which exchange they are of, and each of a KV head's blocks merges
// some of the columns of all its parts, without a counter or a fence between. Products are made on
// tensor cores: the queries of a KV head are rows 0 to G - 1 of 16, and what the other rows hold
// goes nowhere.
#pragma once

#include "attention/cuda_row_tile.cuh"

namespace lockstep {

// Logits of the tile's keys for the group's heads: 8 keys a warp.
template <typename T>
__device__ __forceinline__ void RowLogits(const RowAttentionParams& p, int group, int num_keys,
                                          const RowAttentionMemory<T>& memory) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp >= kRowTileKeys / 8) return;
  const RowLayout layout = memory.layout;
  const uint32_t query = SharedAddress(memory.query), keys = SharedAddress(memory.keys);
  const int key = warp * 8 + lane % 8;
  float acc[2][4] = {};
#pragma unroll 2
  for (int chunk = 0; chunk < layout.all_chunks; chunk += 4) {
    uint32_t a[4], b[4];
    LoadMatrices(b, keys + layout.Chunk(key, chunk + lane / 8) * 16);
    LoadMatrices(a, query + layout.Chunk(lane % 16, chunk + lane / 16) * 16);
    Mma<T>(acc[0], a, b[0], b[1]);
    if (chunk + 2 >= layout.all_chunks) break;
    LoadMatrices(a, query + layout.Chunk(lane % 16, chunk + 2 + lane / 16) * 16);
    Mma<T>(acc[1], a, b[2], b[3]);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int head = lane / 4 + i / 2 * 8, column = warp * 8 + lane % 4 * 2 + i % 2;
    if (head >= group) continue;
    const float sum = acc[0][i] + acc[1][i];
    float logit = sum * p.scale.factor;
    if (p.scale.cap_output != 0) logit = Capped(p.scale, sum);
    memory.logits[head * RowAttentionMemory<T>::kLogitStride + column] =
        column < num_keys ? logit : -INFINITY;
  }
}

// A warp's head of the tile: logits become weights, of the largest logit so far.
template <typename T>
__device__ __forceinline__ void RowSoftmax(int head, const RowAttentionMemory<T>& memory,
                                           float& largest, float& sum) {
  using M = RowAttentionMemory<T>;
  const int lane = threadIdx.x % 32;
  float2 x = {-INFINITY, -INFINITY};
  if (lane < kRowTileKeys / 2) {
    x = reinterpret_cast<const float2*>(memory.logits + head * M::kLogitStride)[lane];
  }
  float top = fmaxf(largest, fmaxf(x.x, x.y));
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, lanes));
  const float offset = top == -INFINITY ? 0.0f : top;
  const float shrink = Exp2(largest - offset);
  x = make_float2(Exp2(x.x - offset), Exp2(x.y - offset));
  float added = x.x + x.y;
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) added += __shfl_xor_sync(~0u, added, lanes);
  sum = fmaf(sum, shrink, added);
  largest = top;
  if (lane < kRowTileKeys / 2) {
    reinterpret_cast<uint32_t*>(memory.weights + head * M::kWeightStride)[lane] = Pack<T>(x.x, x.y);
  }
  if (lane == 0) memory.shrink[head] = shrink;
}

// Weighted values of a tile: a warp has columns 16 w to 16 w + 15, and those 240 further on.
inline constexpr int kRowColumnTurns = (kMaxRowHeadDim / 16 + kRowWarps - 1) / kRowWarps;
using RowSums = float[kRowColumnTurns][2][4];

template <typename T>
__device__ __forceinline__ void AddRowValues(int head_dim, const RowAttentionMemory<T>& memory,
                                             RowSums& acc) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const RowLayout layout = memory.layout;
  const float shrinks[2] = {memory.shrink[lane / 4], memory.shrink[lane / 4 + 8]};
  const uint32_t weights = SharedAddress(
      memory.weights + lane % 16 * RowAttentionMemory<T>::kWeightStride + lane / 16 * 8);
  const uint32_t values = SharedAddress(memory.values);
#pragma unroll
  for (int turn = 0; turn < kRowColumnTurns; ++turn) {
    const int column = (warp + turn * kRowWarps) * 16;
    if (column >= head_dim) break;
#pragma unroll
    for (int i = 0; i < 8; ++i) acc[turn][i / 4][i % 4] *= shrinks[i % 4 / 2];
#pragma unroll
    for (int key = 0; key < kRowTileKeys; key += 16) {
      uint32_t a[4], b[4];
      LoadMatrices(a, weights + key * 2);
      LoadMatricesTransposed(b,
                             values + layout.Chunk(key + lane % 16, column / 8 + lane / 16) * 16);
      Mma<T>(acc[turn][0], a, b[0], b[1]);
      Mma<T>(acc[turn][1], a, b[2], b[3]);
    }
  }
}

// All tiles of an item that is prepared, whose first is on its way; its partial result.
template <typename T>
__device__ __forceinline__ void AttendRowItem(const RowAttentionParams& p, const RowPosition& now,
                                              const RowAttentionLayer& layer, const RowItem& item,
                                              const RowExchange& exchange,
                                              const RowAttentionMemory<T>& memory) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const RowLayout layout = memory.layout;
  const int first = p.first_head[item.kv_head];
  const int group = p.first_head[item.kv_head + 1] - first;
  RowSums acc = {};
  float largest = -INFINITY, sum = 0;
  for (int begin = item.begin; begin < item.end; begin += kRowTileKeys) {
    const int next = begin + kRowTileKeys;
    WaitForCopies<1>();  // the keys have come
    if (begin != item.begin) {
      const int newest = item.Newest(now, begin);
      const int chunk = static_cast<int>(threadIdx.x) / 2, is_value = threadIdx.x % 2;
      if (newest >= 0 && newest < kRowTileKeys && chunk < layout.chunks) {
        T* const rows = is_value ? memory.values : memory.keys;
        reinterpret_cast<uint4*>(rows)[layout.Chunk(newest, chunk)] =
            reinterpret_cast<const uint4*>(memory.new_rows)[layout.Chunk(is_value, chunk)];
      }
    }
    RowThreadsMeet();
    RowLogits(p, group, item.end - begin, memory);
    RowThreadsMeet();
    if (next < item.end) {
      LoadRowTile<true, false>(p, now, layer.keys, nullptr, item, next, memory);
    } else {
      CommitCopies();  // of nothing, so that the values' group is the last but one
    }
    if (warp < group) RowSoftmax(warp, memory, largest, sum);
    WaitForCopies<1>();  // the values have come
    RowThreadsMeet();
    AddRowValues(p.head_dim, memory, acc);
    if (next >= item.end) break;
    RowThreadsMeet();
    LoadRowTile<false, true>(p, now, nullptr, layer.values, item, next, memory);
  }
  if (warp < group && lane == 0) {
    StoreRowFloats(p.stats + (first + warp) * kMaxRowSplits + item.split, largest, sum, exchange);
  }
#pragma unroll
  for (int turn = 0; turn < kRowColumnTurns; ++turn) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int head = lane / 4 + i / 2 * 8;
      const int dim = (warp + turn * kRowWarps) * 16 + i % 2 * 8 + lane % 4 * 2;
      if (head >= group || dim >= p.head_dim) continue;
      StoreRowFloats(
          p.partials + ((first + head) * kMaxRowSplits + item.split) * (p.head_dim / 2) + dim / 2,
          acc[turn][i % 2][i / 2 * 2], acc[turn][i % 2][i / 2 * 2 + 1], exchange);
    }
  }
}

// This part's share of the result of its KV head's query heads, pairs of columns, of all parts;
// they are added in ascending order. The values to be added meet where the keys were, [pairs,
// parts].
template <typename T>
__device__ __forceinline__ void MergeRowParts(const RowAttentionParams& p, const RowItem& item,
                                              int num_splits, const RowExchange& exchange,
                                              const RowAttentionMemory<T>& memory) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first = p.first_head[item.kv_head];
  const int group = p.first_head[item.kv_head + 1] - first;
  const int head_pairs = p.head_dim / 2;
  const int begin = group * head_pairs * item.split / num_splits;
  const int count = group * head_pairs * (item.split + 1) / num_splits - begin;
  const auto part = [&](int at) {
    const int pair = begin + at / num_splits, split = at % num_splits;
    return p.partials + ((first + pair / head_pairs) * kMaxRowSplits + split) * head_pairs +
           pair % head_pairs;
  };
  // The first values are on their way while the factors are made.
  RowFloats values;
  int at = static_cast<int>(threadIdx.x);
  if (at < count * num_splits) values.Load(part(at));

  float* const factors = memory.logits;  // [G, kMaxRowSplits]
  if (warp < group) {
    const RowFloats* const from = p.stats + (first + warp) * kMaxRowSplits + lane;
    RowFloats stat;
    if (lane < num_splits) stat.Load(from);
    stat.Wait(from, lane < num_splits, exchange);
    const float2 pair = lane < num_splits ? stat.Values() : float2{-INFINITY, 0};
    float top = pair.x;
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, lanes));
    const float factor = Exp2(pair.x - (top == -INFINITY ? 0.0f : top));
    float total = pair.y * factor;
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) total += __shfl_xor_sync(~0u, total, lanes);
    factors[warp * kMaxRowSplits + lane] = total > 0 ? factor / total : 0.0f;
  }
  auto* const met = reinterpret_cast<float2*>(memory.keys);
#pragma unroll 1
  for (; at - lane < count * num_splits; at += kRowThreads) {
    const bool wanted = at < count * num_splits;
    const RowFloats* const from = part(wanted ? at : 0);
    if (at != static_cast<int>(threadIdx.x) && wanted) values.Load(from);
    values.Wait(from, wanted, exchange);
    if (wanted) met[at] = values.Values();
  }
  RowThreadsMeet();
  for (int i = threadIdx.x; i < count; i += kRowThreads) {
    const int pair = begin + i;
    const float* const factor = factors + pair / head_pairs * kMaxRowSplits;
    float2 sum = {};
    for (int split = 0; split < num_splits; ++split) {
      const float2 value = met[i * num_splits + split];
      sum.x = fmaf(value.x, factor[split], sum.x);
      sum.y = fmaf(value.y, factor[split], sum.y);
    }
    uint32_t* const to = p.attended + first * p.head_dim + pair * 2;
    StoreRowWord(to, FromFloat<T>(sum.x), exchange);
    StoreRowWord(to + 1, FromFloat<T>(sum.y), exchange);
  }
}

// A step of padding: KV head `kv_head` has nothing to see.
template <typename T>
__device__ __forceinline__ void ClearRowHeads(const RowAttentionParams& p, int kv_head,
                                              const RowExchange& exchange) {
  const int end = p.first_head[kv_head + 1] * p.head_dim;
  for (int at = p.first_head[kv_head] * p.head_dim + threadIdx.x; at < end; at += kRowThreads) {
    StoreRowWord(p.attended + at, FromFloat<T>(0.0f), exchange);
  }
}

}  // namespace lockstep
