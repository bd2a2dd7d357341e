// The computation of one tile of decode: its place in shared memory, logits, softmax, weighted
// values. See cuda_decode.cu for who does what.
//
// Keys and values are the products' first operand, so that heads are its 8 columns: of S^T = K Q^T
// the 16 rows are keys, of O^T = V^T P^T they are columns of the head. Fragments: see
// cuda_tensor_core.cuh; lane = 4 g + c.
#pragma once

#include "attention/cuda_device_code.cuh"
#include "attention/cuda_page_copy.cuh"

namespace lockstep {
namespace decode {

inline constexpr int kWarps = 4;  // that compute; one more copies
inline constexpr int kConsumers = 32 * kWarps;
inline constexpr int kThreads = kConsumers + 32;
inline constexpr int kWarpKeys = 16;
inline constexpr int kKeys = kWarpKeys * kWarps;
static_assert(kFirstKeyMultiple % kWarpKeys == 0 && kKeys == kDecodeKeyTile);

// D padded to kDim, and each warp's 16 keys apart: panels of 128 bytes of the rows, 16 rows each,
// as the copy engine brings them, 16-byte pieces permuted by the row's number. Then as much of the
// values, then the queries of 8 * kGroups heads.
//
// D = 128: 3 stages of 34 KiB are half of what a multiprocessor has, so there are two blocks: 192
// KiB of copies under way, where 4.5 TB/s and 1 us of latency take 34 KiB.
template <typename Cache, int kDim, int kGroups>
struct Layout {
  static constexpr int kRowBytes = kDim * sizeof(Cache);
  static constexpr int kPanels = (kRowBytes + kPanelBytes - 1) / kPanelBytes;
  static constexpr int kBoxPanelBytes = kWarpKeys * kPanelBytes;
  static constexpr int kSubtileBytes = kPanels * kBoxPanelBytes;
  static constexpr int kTileBytes = kWarps * kSubtileBytes;
  static constexpr int kQueryBytes = 8 * kGroups * kDim * 2;
  static constexpr int kStageBytes = 2 * kTileBytes + kQueryBytes;
  static_assert(kStageBytes % 1024 == 0);

  // Of 228 KiB, of which each block takes one more.
  static constexpr int kSmallBytes = 3 << 10;
  static constexpr int kBlockBytes = (228 << 10) / DecodeBlocksAtOnce(kDim) - (1 << 10);
  static constexpr int kStages = (kBlockBytes - kSmallBytes) / kStageBytes;
  static_assert(kStages >= 2);
};

// What a stage holds.
struct alignas(16) StageInfo {
  int32_t begin;  // visible keys of the tile, may be outside [0, kKeys]
  int32_t end;
  int32_t is_first;  // tile of its item
  int32_t is_last;   // tile of its part; kLastOfItem
  int32_t row;
  int32_t first_head;
  int32_t num_heads;
  int32_t request;
  int32_t split;
  int32_t num_splits;
  int32_t num_runs;
};
enum : int32_t { kLastOfPart = 1, kLastOfItem = 2, kEndOfWork = 3 };

template <typename Cache, int kDim, int kGroups>
struct Memory {
  using L = Layout<Cache, kDim, kGroups>;
  unsigned char stages[L::kStages][L::kStageBytes];
  StageInfo info[L::kStages];
  float2 stats[2][kWarps][8 * kGroups];  // of every other part: each warp's maxima and sums
  uint64_t full[L::kStages];
  uint64_t empty[L::kStages];
  uint32_t runs_before;  // of a run's row and heads, done when it was
};

// What a warp keeps of its keys of an item. This lane's heads are 2 c and 2 c + 1 of each 8.
template <int kDim, int kGroups>
struct WarpState {
  uint32_t query[kGroups][kDim / 16][2];
  float acc[kGroups][kDim / 16][4];
  float max[kGroups][2];
  float sum[kGroups][2];      // this lane's keys only
  float unscale[kGroups][2];  // beside an fp8 cache: what logits are to be multiplied with

  __device__ void Reset() {
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
#pragma unroll
      for (int i = 0; i < kDim / 4; ++i) acc[n][i / 4][i % 4] = 0;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        max[n][j] = -INFINITY;
        sum[n][j] = 0;
      }
    }
  }
};

// A fragment of 8 x 8 matrix of pairs, transposed.
__device__ inline uint32_t Transposed(uint32_t matrix) {
  uint32_t result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(matrix));
  return result;
}

// Of a warp's keys or values, this lane's addresses for LoadMatrices: load `i` has 32 bytes of 16
// rows, rows 0 to 7 of the first 16 bytes, rows 8 to 15, and the same of the last 16 bytes.
struct FragmentAddresses {
  uint32_t offset[4];

  __device__ FragmentAddresses() {
    const uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      offset[i] = lane % 16 * kPanelBytes + ((2 * i + lane / 16) ^ (lane % 8)) * 16;
    }
  }
  __device__ uint32_t At(uint32_t base, int i) const {
    return base + offset[i % 4] + i / 4 * (kWarpKeys * kPanelBytes);
  }
};

// Fragments of the queries, as columns. An fp8 key's 4 numbers from 4 c on are what a lane gets of
// 16, so that these are, in its order, numbers 2 c, 2 c + 1, 2 c + 8 and 2 c + 9 of the products'.
template <typename T, typename Cache, int kDim, int kGroups>
__device__ void LoadQuery(const unsigned char* queries, int head_dim,
                          WarpState<kDim, kGroups>& state) {
  const int lane = threadIdx.x % 32;
  const int row_bytes = head_dim * 2;
#pragma unroll
  for (int n = 0; n < kGroups; ++n) {
    if constexpr (!kIsFp8<Cache>) {
      const uint32_t row = SharedAddress(queries) + (n * 8 + lane % 8) * row_bytes;
#pragma unroll
      for (int k = 0; k < kDim / 16; k += 2) {
        uint32_t pieces[4];  // of 8 columns
        LoadMatrices(pieces, row + (2 * k + lane / 8) * 16);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          state.query[n][k + i / 2][i % 2] = (2 * k + i) * 8 < head_dim ? pieces[i] : 0;
        }
      }
    } else {
      const unsigned char* const row = queries + (n * 8 + lane / 4) * row_bytes + lane % 4 * 8;
      float largest = 0;
#pragma unroll
      for (int k = 0; k < kDim / 16; ++k) {
        uint2 four = make_uint2(0, 0);
        if (k * 16 < head_dim) four = *reinterpret_cast<const uint2*>(row + k * 32);
        state.query[n][k][0] = four.x;
        state.query[n][k][1] = four.y;
        largest = fmaxf(largest, fmaxf(LargerOfPair<T>(four.x), LargerOfPair<T>(four.y)));
      }
      largest = fmaxf(largest, __shfl_xor_sync(kFullWarp, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(kFullWarp, largest, 2));
      const QueryScale scale(largest);
      const float down = std::is_same_v<T, __half> ? 1.0f : scale.down;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        state.unscale[n][j] = __shfl_sync(kFullWarp, down, (lane % 4 * 2 + j) * 4);
      }
#pragma unroll
      for (int k = 0; k < kDim / 16; ++k) {
        state.query[n][k][0] = QueryPair<T>(state.query[n][k][0], scale.up);
        state.query[n][k][1] = QueryPair<T>(state.query[n][k][1], scale.up);
      }
    }
  }
}

// Products of the warp's 16 keys with the queries: c[n][0], [1] of key g, [2], [3] of key g + 8.
template <typename T, typename Cache, int kDim, int kGroups>
__device__ void MultiplyKeys(uint32_t keys, const FragmentAddresses& addresses,
                             const WarpState<kDim, kGroups>& state, float (&c)[kGroups][4]) {
  float odd[kGroups][4] = {};  // a second chain of products
#pragma unroll
  for (int i = 0; i < kDim * static_cast<int>(sizeof(Cache)) / 32; ++i) {
    uint32_t r[4];
    LoadMatrices(r, addresses.At(keys, i));
    if constexpr (!kIsFp8<Cache>) {
#pragma unroll
      for (int n = 0; n < kGroups; ++n) {
        Mma<T>(i % 2 == 0 ? c[n] : odd[n], r, state.query[n][i][0], state.query[n][i][1]);
      }
    } else {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        uint32_t a[4];
        WidenFp8(r[2 * j], a[0], a[2]);
        WidenFp8(r[2 * j + 1], a[1], a[3]);
#pragma unroll
        for (int n = 0; n < kGroups; ++n) {
          Mma<__half>(j == 0 ? c[n] : odd[n], a, state.query[n][2 * i + j][0],
                      state.query[n][2 * i + j][1]);
        }
      }
    }
  }
#pragma unroll
  for (int n = 0; n < kGroups; ++n) {
#pragma unroll
    for (int j = 0; j < 4; ++j) c[n][j] += odd[n][j];
  }
}

// From products to logits, of keys [begin, end) of the warp's 16.
template <typename Cache, int kDim, int kGroups>
__device__ void FinishLogits(const LogitScale& scale, int begin, int end,
                             const WarpState<kDim, kGroups>& state, float (&c)[kGroups][4]) {
  const int key = static_cast<int>(threadIdx.x) % 32 / 4;
#pragma unroll
  for (int n = 0; n < kGroups; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kIsFp8<Cache>) c[n][i] *= state.unscale[n][i % 2];
      if (scale.cap_output != 0) c[n][i] = Capped(scale, c[n][i]);
    }
    if (begin <= 0 && end >= kWarpKeys) continue;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int its_key = key + i / 2 * 8;
      if (its_key < begin || its_key >= end) c[n][i] = -INFINITY;
    }
  }
}

// Softmax by parts of 16 keys for 8 heads: weights become a fragment of columns, what there is of
// the sum and of the weighted values shrinks.
template <typename Product, int kDim, int kGroups>
__device__ void Weigh(float factor, int n, float (&c)[4], WarpState<kDim, kGroups>& state,
                      uint32_t (&weights)[2]) {
  float shrink[2];
  float max[2];
#pragma unroll
  for (int j = 0; j < 2; ++j) max[j] = fmaxf(state.max[n][j], fmaxf(c[j], c[2 + j]));
#pragma unroll
  for (int step = 4; step < 32; step *= 2) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      max[j] = fmaxf(max[j], __shfl_xor_sync(kFullWarp, max[j], step));
    }
  }
  const bool grown = max[0] > state.max[n][0] || max[1] > state.max[n][1];
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const float offset = max[j] == -INFINITY ? 0.0f : max[j] * factor;
    shrink[j] = max[j] == state.max[n][j] ? 1.0f : Exp2(fmaf(state.max[n][j], factor, -offset));
    c[j] = Exp2(fmaf(c[j], factor, -offset));
    c[2 + j] = Exp2(fmaf(c[2 + j], factor, -offset));
    state.max[n][j] = max[j];
    state.sum[n][j] = fmaf(state.sum[n][j], shrink[j], c[j] + c[2 + j]);
  }
  weights[0] = Transposed(Pack<Product>(c[0], c[1]));
  weights[1] = Transposed(Pack<Product>(c[2], c[3]));
  if (!__any_sync(kFullWarp, grown)) return;
#pragma unroll
  for (int i = 0; i < kDim / 4; ++i) state.acc[n][i / 4][i % 4] *= shrink[i % 2];
}

// Row g of 16 columns of the values is column g of an fp8 cache's even ones, row g + 8 of its odd
// ones; else rows are columns.
template <typename T, typename Cache, int kDim, int kGroups>
__device__ void AddValues(uint32_t values, const FragmentAddresses& addresses,
                          const uint32_t (&weights)[kGroups][2], WarpState<kDim, kGroups>& state) {
#pragma unroll
  for (int i = 0; i < kDim * static_cast<int>(sizeof(Cache)) / 32; ++i) {
    uint32_t r[4];
    LoadMatricesTransposed(r, addresses.At(values, i));
    if constexpr (!kIsFp8<Cache>) {
      const uint32_t a[4] = {r[0], r[2], r[1], r[3]};
#pragma unroll
      for (int n = 0; n < kGroups; ++n) Mma<T>(state.acc[n][i], a, weights[n][0], weights[n][1]);
    } else {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        uint32_t a[4];
        WidenFp8Pairs(r[2 * j], a[0], a[1]);
        WidenFp8Pairs(r[2 * j + 1], a[2], a[3]);
#pragma unroll
        for (int n = 0; n < kGroups; ++n) {
          Mma<__half>(state.acc[n][2 * i + j], a, weights[n][0], weights[n][1]);
        }
      }
    }
  }
}

// Rows of the warp's values outside [begin, end) become zero: whatever was there, NaN included,
// is to count nothing.
template <int kPanels>
__device__ void ClearValues(unsigned char* values, int begin, int end) {
  for (int i = static_cast<int>(threadIdx.x) % 32; i < kPanels * kWarpKeys * 8; i += 32) {
    const int key = i / 8 % kWarpKeys;
    if (key < begin || key >= end)
      *reinterpret_cast<uint4*>(values + i * 16) = make_uint4(0, 0, 0, 0);
  }
  FenceAsyncProxy();  // before the copy engine writes here again
  __syncwarp();
}

// The warp's keys of a tile, [begin, end) of which are visible: at least one.
template <typename T, typename Cache, int kDim, int kGroups>
__device__ void AttendKeys(const LogitScale& scale, int begin, int end, unsigned char* keys,
                           const FragmentAddresses& addresses, WarpState<kDim, kGroups>& state) {
  using L = Layout<Cache, kDim, kGroups>;
  unsigned char* const values = keys + L::kTileBytes;
  if (begin > 0 || end < kWarpKeys) ClearValues<L::kPanels>(values, begin, end);
  float c[kGroups][4] = {};
  MultiplyKeys<T, Cache>(SharedAddress(keys), addresses, state, c);
  FinishLogits<Cache>(scale, begin, end, state, c);
  const float factor = scale.cap_output != 0 ? 1.0f : scale.factor;
  uint32_t weights[kGroups][2];
#pragma unroll
  for (int n = 0; n < kGroups; ++n) {
    Weigh<ProductType<T, Cache>>(factor, n, c[n], state, weights[n]);
  }
  AddValues<T, Cache>(SharedAddress(values), addresses, weights, state);
}

}  // namespace decode
}  // namespace lockstep
