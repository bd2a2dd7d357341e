// Prefill by warpgroup products: what a consumer does with one tile of keys. When it does what:
// cuda_prefill_wgmma.cu.
#pragma once

#include "attention/cuda_prefill_producer.cuh"

namespace lockstep::prefill_wgmma {

// ---- Products -----------------------------------------------------------------------------------

template <typename T, int kDim>
__device__ void IssueLogits(uint32_t query, uint32_t keys,
                            float (&logits)[TileLayout<kDim>::kKeys / 8][4]) {
  using Tile = TileLayout<kDim>;
  PinRegisters(logits);
  WgmmaFence();
#pragma unroll
  for (int k = 0; k < kDim / 16; ++k) {
    const uint32_t column_bytes = k % 4 * 32;
    Wgmma<T, Tile::kKeys>::MultiplyRows(
        logits,
        PanelDescriptor(query + k / 4 * Memory<kDim>::kQueryPanelBytes + column_bytes,
                        8 * kPanelRowBytes, 16),
        PanelDescriptor(keys + k / 4 * Tile::kPanelBytes + column_bytes, Tile::kGroupBytes, 16),
        k == 0 ? 0 : 1);
  }
  WgmmaCommit();
}

// The warp's 16 rows of Q as A fragments.
template <int kDim>
__device__ void LoadFragments(uint32_t query, uint32_t (&a)[kDim / 16][4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int row = static_cast<int>(threadIdx.x) % kGroupThreads / 32 * 16 + lane % 16;
#pragma unroll
  for (int k = 0; k < kDim / 16; ++k) {
    LoadMatrices(a[k], query + PanelOffset(row, 2 * k + lane / 16, Memory<kDim>::kQueryPanelBytes));
  }
}

template <typename T, int kDim>
__device__ void IssueLogits(uint32_t (&query)[kDim / 16][4], uint32_t keys,
                            float (&logits)[TileLayout<kDim>::kKeys / 8][4]) {
  using Tile = TileLayout<kDim>;
  PinRegisters(logits);
  PinRegisters(query);
  WgmmaFence();
#pragma unroll
  for (int k = 0; k < kDim / 16; ++k) {
    const uint32_t column_bytes = k % 4 * 32;
    Wgmma<T, Tile::kKeys>::MultiplyRows(
        logits, query[k],
        PanelDescriptor(keys + k / 4 * Tile::kPanelBytes + column_bytes, Tile::kGroupBytes, 16),
        k == 0 ? 0 : 1);
  }
  WgmmaCommit();
}

template <typename T, int kDim>
__device__ void IssueValues(uint32_t values, uint32_t (&weights)[TileLayout<kDim>::kKeys / 16][4],
                            float (&acc)[kDim / 8][4]) {
  using Tile = TileLayout<kDim>;
  PinRegisters(acc);
  PinRegisters(weights);
  WgmmaFence();
#pragma unroll
  for (int k = 0; k < Tile::kKeys / 16; ++k) {
    Wgmma<T, kDim>::MultiplyColumns(
        acc, weights[k],
        PanelDescriptor(values + k * 2 * Tile::kGroupBytes, Tile::kGroupBytes, Tile::kPanelBytes));
  }
  WgmmaCommit();
}

// Rows of a tile of values outside [from, to) become zero, where a weight of 0 would not make
// nothing of what lies there. Every consumer does it for itself.
template <int kDim>
__device__ void ZeroValuesOutside(int32_t from, int32_t to, int group, unsigned char* values) {
  using Tile = TileLayout<kDim>;
  const int thread = static_cast<int>(threadIdx.x) % kGroupThreads;
  for (int i = thread; i < Tile::kKeys * Tile::kPanels * 8; i += kGroupThreads) {
    const int row = i / (Tile::kPanels * 8);
    const int piece = i % (Tile::kPanels * 8);
    if (row >= from && row < to) continue;
    // Its place among the pieces of its row's panel does not matter.
    *reinterpret_cast<uint4*>(values + row / 8 * Tile::kGroupBytes + row % 8 * kPanelRowBytes +
                              piece / 8 * Tile::kPanelBytes + piece % 8 * 16) =
        make_uint4(0, 0, 0, 0);
  }
  FenceAsyncProxy();
  SyncWarpgroup(kGroupBarrier + group);
}

// ---- Softmax ------------------------------------------------------------------------------------

// A row's weights are relative to its largest logit, or to one up to 2^kSlack smaller (in powers
// of 2): so weighted values are rarely scaled, and nothing overflows.
inline constexpr float kSlack = 8;

template <int kKeys>
__device__ void MaskLogits(const PrefillParams& p, int32_t first_key, const SoftmaxRows& rows,
                           float (&logits)[kKeys / 8][4]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    // Of this lane's first key.
    const int32_t first = first_key + static_cast<int32_t>(threadIdx.x) % 4 * 2;
    const int32_t highest = rows.position[h] - first;
    const int32_t lowest = LowestVisible(rows.position[h], p.window) - first;
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int key = n * 8 + j;
        if (key < lowest || key > highest) logits[n][2 * h + j] = -INFINITY;
      }
    }
  }
}

// Products become weights.
template <int kKeys, bool kCapped>
__device__ void ComputeWeights(const PrefillParams& p, bool masked, int32_t first_key,
                               float (&logits)[kKeys / 8][4], SoftmaxRows& rows) {
  const float factor = kCapped ? 1.0f : p.scale.factor;
  if constexpr (kCapped) {
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
      for (int j = 0; j < 4; ++j) logits[n][j] = Capped(p.scale, logits[n][j]);
    }
  }
  if (masked) MaskLogits<kKeys>(p, first_key, rows, logits);
  float max[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    max[h] = fmaxf(logits[0][2 * h], logits[0][2 * h + 1]);
#pragma unroll
    for (int n = 1; n < kKeys / 8; ++n) {
      max[h] = fmaxf(max[h], fmaxf(logits[n][2 * h], logits[n][2 * h + 1]));
    }
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) max[h] = fmaxf(max[h], __shfl_xor_sync(kFullWarp, max[h], 1));
#pragma unroll
  for (int h = 0; h < 2; ++h) max[h] = fmaxf(max[h], __shfl_xor_sync(kFullWarp, max[h], 2));
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    // False for two of -infinity.
    const bool grows = (max[h] - rows.max[h]) * factor > kSlack;
    rows.shrink[h] = grows ? Exp2((rows.max[h] - max[h]) * factor) : 1.0f;
    if (grows) rows.max[h] = max[h];
    const float offset = rows.max[h] == -INFINITY ? 0.0f : rows.max[h] * factor;
    WeighRow<kKeys>(h, factor, offset, logits, rows);
  }
}

// What follows a branch on it, follows all weights: whether sums are below 0.
__device__ inline bool Impossible(const SoftmaxRows& rows) {
  return rows.sum[0] < 0 || rows.sum[1] < 0;
}

}  // namespace lockstep::prefill_wgmma
