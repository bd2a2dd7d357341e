// The computation of one tile of decode: its place in shared memory, logits, softmax, weighted
// values. See cuda_decode.cu for who does what.
#pragma once

#include "attention/cuda_device_code.cuh"

namespace lockstep {
namespace decode {

inline constexpr int kWarps = 4;
inline constexpr int kThreads = 32 * kWarps;
inline constexpr int kKeys = kDecodeKeyTile;
static_assert(kKeys == 16 * kWarps && kKeys <= kThreads);

// D padded to kDim. A stage of the ring: 64 rows of K, 64 of V, 16 of queries. Where a row is a
// multiple of 128 bytes, its 16-byte pieces are permuted by the row's number, else rows are an odd
// number of 16 bytes apart; both put the same columns of 8 rows into different banks. D = 128: 3
// stages of 144 * 256 bytes and 5 KiB make 112.7 KiB, just half of what a multiprocessor has: two
// blocks, whose 128 KiB of copies under way are more than the 34 KiB that 4.5 TB/s and 1 us of
// latency take. An fp8 cache has as many under way in 5 stages of 20.3 KiB.
template <typename Cache, int kDim>
struct Layout {
  static constexpr int kStages = kIsFp8<Cache> ? 5 : 3;
  static constexpr int kPiece = 16 / sizeof(Cache);  // elements
  static constexpr int kPieces = kDim / kPiece;      // of a row
  static constexpr bool kPermuted = kPieces % 8 == 0;
  static constexpr int kRowBytes = (kPermuted || kPieces % 2 == 1 ? kPieces : kPieces + 1) * 16;
  static constexpr int kTileBytes = kKeys * kRowBytes;
  // Queries lie as keys do, beside an fp8 cache plainly.
  static constexpr int kQueryRowBytes = kIsFp8<Cache> ? kDim * 2 + 16 : kRowBytes;
  static constexpr int kStageBytes = 2 * kTileBytes + kDecodeHeadTile * kQueryRowBytes;

  // Of a row of which `row % 8` is given, the byte offset of its 16-byte piece `chunk`.
  static __device__ uint32_t Chunk(int row, int chunk) {
    return static_cast<uint32_t>(kPermuted ? chunk ^ (row % 8) : chunk) * 16;
  }
};

// What a stage holds.
struct StageInfo {
  int32_t end_of_work;  // 1: nothing, and nothing follows
  int32_t begin;        // visible keys of the tile, may be outside [0, 64]
  int32_t end;
  int32_t is_first;  // tile of its item
  int32_t is_last;
  int32_t request;
  int32_t row;
  int32_t split;
  int32_t num_splits;
  int32_t first_head;
  int32_t num_heads;
};

template <typename Cache, int kDim>
struct Memory {
  using L = Layout<Cache, kDim>;
  unsigned char stages[L::kStages][L::kStageBytes];
  // Logits of the tile; the key's number is permuted by the row's: see LogitIndex.
  float logits[kDecodeHeadTile * kKeys];
  int32_t cache_rows[L::kStages - 1][kKeys];  // of tiles to be copied; -1: not visible
  StageInfo info[L::kStages];
  uint32_t parts_before;  // of a part's request and heads, done when it was
};

// Rows 0 to 3 of a pair of neighbouring keys lie in different banks.
inline __device__ int LogitIndex(int row, int key) { return row * kKeys + (key ^ (row % 4 * 8)); }

// What a warp keeps of an item. Rows g and g + 8 of the heads are this lane's; the second half is
// left out where the tile has at most 8 heads.
template <int kDim>
struct WarpState {
  // Pairs of 8 columns; of all D / 16, warp w has w, w + 4, ...
  static constexpr int kPairs = (kDim / 16 + kWarps - 1) / kWarps;

  uint32_t query[kDim / 16][4];
  float acc[kPairs][2][4];
  float max[2];
  float sum[2];      // this lane's keys only
  float unscale[2];  // beside an fp8 cache: what logits are to be multiplied with

  __device__ void Reset() {
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
#pragma unroll
      for (int i = 0; i < 8; ++i) acc[j][i / 4][i % 4] = 0;
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      max[h] = -INFINITY;
      sum[h] = 0;
    }
  }
};

// Fragments of the queries. An fp8 key's 4 numbers from 4 c on are what a lane gets of 16, so that
// these are, in its order, numbers 2 c, 2 c + 1, 2 c + 8 and 2 c + 9 of the products' 16.
template <typename T, typename Cache, int kDim>
__device__ void LoadQuery(uint32_t stage, const unsigned char* memory, WarpState<kDim>& state) {
  using L = Layout<Cache, kDim>;
  const int lane = threadIdx.x % 32;
  if constexpr (!kIsFp8<Cache>) {
    const uint32_t row = stage + 2 * L::kTileBytes + lane % 16 * L::kQueryRowBytes;
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
      LoadMatrices(state.query[k], row + L::Chunk(lane % 8, 2 * k + lane / 16));
    }
  } else {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const unsigned char* const row =
          memory + 2 * L::kTileBytes + (lane / 4 + h * 8) * L::kQueryRowBytes + lane % 4 * 8;
      float largest = 0;
#pragma unroll
      for (int k = 0; k < kDim / 16; ++k) {
        const uint2 four = *reinterpret_cast<const uint2*>(row + k * 32);
        state.query[k][h] = four.x;
        state.query[k][2 + h] = four.y;
        largest = fmaxf(largest, fmaxf(LargerOfPair<T>(four.x), LargerOfPair<T>(four.y)));
      }
      largest = fmaxf(largest, __shfl_xor_sync(kFullWarp, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(kFullWarp, largest, 2));
      const QueryScale scale(largest);
      state.unscale[h] = std::is_same_v<T, __half> ? 1.0f : scale.down;
#pragma unroll
      for (int k = 0; k < kDim / 16; ++k) {
        state.query[k][h] = QueryPair<T>(state.query[k][h], scale.up);
        state.query[k][2 + h] = QueryPair<T>(state.query[k][2 + h], scale.up);
      }
    }
  }
}

// Products of the warp's 16 keys: c[chain][half of the keys], chains over even and odd k.
template <typename T, typename Cache, int kDim>
__device__ void MultiplyKeys(uint32_t stage, const WarpState<kDim>& state, float (&c)[2][2][4]) {
  using L = Layout<Cache, kDim>;
  const int lane = threadIdx.x % 32;
  const int first = threadIdx.x / 32 * 16;
  if constexpr (!kIsFp8<Cache>) {
    const uint32_t row = stage + (first + lane / 16 * 8 + lane % 8) * L::kRowBytes;
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
      uint32_t b[4];
      LoadMatrices(b, row + L::Chunk(lane % 8, 2 * k + lane / 8 % 2));
      Mma<T>(c[k % 2][0], state.query[k], b[0], b[1]);
      Mma<T>(c[k % 2][1], state.query[k], b[2], b[3]);
    }
  } else {
    // Four matrices of 8 keys by 16 bytes: both halves of the keys, two k. An odd last one's second
    // k lies in what follows the row, and is not used.
    const uint32_t row = stage + (first + lane % 16) * L::kRowBytes;
#pragma unroll
    for (int k = 0; k < kDim / 16; k += 2) {
      uint32_t fours[4];
      LoadMatrices(fours, row + L::Chunk(lane % 8, k + lane / 16));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (k + i / 2 >= kDim / 16) continue;
        uint32_t b[2];
        WidenFp8(fours[i], b[0], b[1]);
        Mma<__half>(c[i / 2][i % 2], state.query[k + i / 2], b[0], b[1]);
      }
    }
  }
}

// Logits of the warp's 16 keys, as products or capped, into shared memory.
template <typename T, typename Cache, int kDim>
__device__ void ComputeLogits(const LogitScale& scale, const StageInfo& info, uint32_t stage,
                              const WarpState<kDim>& state, float* logits) {
  const int lane = threadIdx.x % 32;
  const int first = threadIdx.x / 32 * 16;
  float c[2][2][4] = {};
  MultiplyKeys<T, Cache, kDim>(stage, state, c);
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const int key = first + n * 8 + lane % 4 * 2;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (h == 1 && info.num_heads <= 8) continue;
      float pair[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        pair[j] = c[0][n][2 * h + j] + c[1][n][2 * h + j];
        if constexpr (kIsFp8<Cache>) pair[j] *= state.unscale[h];
        if (scale.cap_output != 0) pair[j] = Capped(scale, pair[j]);
        if (key + j < info.begin || key + j >= info.end) pair[j] = -INFINITY;
      }
      *reinterpret_cast<float2*>(logits + LogitIndex(lane / 4 + h * 8, key)) =
          make_float2(pair[0], pair[1]);
    }
  }
}

// Softmax of the 64 logits of row half h: weights become A fragments, the state follows; returns
// what the weighted values shrink by.
template <typename T, int kDim>
__device__ float SoftmaxRow(float factor, const float* logits, int h, uint32_t (&weights)[4][4],
                            WarpState<kDim>& state) {
  const int lane = threadIdx.x % 32;
  float2 x[8];  // keys 8 i + 2 c, 8 i + 2 c + 1
  float max = state.max[h];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    x[i] = *reinterpret_cast<const float2*>(logits +
                                            LogitIndex(lane / 4 + h * 8, i * 8 + lane % 4 * 2));
    max = fmaxf(max, fmaxf(x[i].x, x[i].y));
  }
  max = fmaxf(max, __shfl_xor_sync(kFullWarp, max, 1));
  max = fmaxf(max, __shfl_xor_sync(kFullWarp, max, 2));
  const float offset = max == -INFINITY ? 0.0f : max * factor;
  const float shrink = max == state.max[h] ? 1.0f : Exp2(fmaf(state.max[h], factor, -offset));
  float sum = state.sum[h] * shrink;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    x[i].x = Exp2(fmaf(x[i].x, factor, -offset));
    x[i].y = Exp2(fmaf(x[i].y, factor, -offset));
    sum += x[i].x + x[i].y;
    weights[i / 2][i % 2 * 2 + h] = Pack<T>(x[i].x, x[i].y);
  }
  state.max[h] = max;
  state.sum[h] = sum;
  return shrink;
}

// Weighted values of 16 columns. Of an fp8 cache the even ones are the first 8 of the products, the
// odd ones the last.
template <typename T, typename Cache, int kDim>
__device__ void AddColumns(uint32_t stage, int pair, const uint32_t (&weights)[4][4],
                           float (&acc)[2][4]) {
  using L = Layout<Cache, kDim>;
  const int lane = threadIdx.x % 32;
  const uint32_t values = stage + L::kTileBytes;
  if constexpr (!kIsFp8<Cache>) {
    const uint32_t row = values + lane % 16 * L::kRowBytes;
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
      uint32_t b[4];
      LoadMatricesTransposed(
          b, row + k * 16 * L::kRowBytes + L::Chunk(lane % 8, 2 * pair + lane / 16));
      Mma<T>(acc[0], weights[k], b[0], b[1]);
      Mma<T>(acc[1], weights[k], b[2], b[3]);
    }
  } else {
    const uint32_t row = values + lane * L::kRowBytes + L::Chunk(lane % 8, pair);
#pragma unroll
    for (int k = 0; k < kKeys / 16; k += 2) {
      uint32_t pairs[4];  // of 4 times 8 keys
      LoadMatricesTransposed(pairs, row + k * 16 * L::kRowBytes);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t even[2];
        uint32_t odd[2];
        WidenFp8Pairs(pairs[2 * i], even[0], odd[0]);
        WidenFp8Pairs(pairs[2 * i + 1], even[1], odd[1]);
        Mma<__half>(acc[0], weights[k + i], even[0], even[1]);
        Mma<__half>(acc[1], weights[k + i], odd[0], odd[1]);
      }
    }
  }
}

template <typename T, typename Cache, int kDim>
__device__ void AddValues(uint32_t stage, const uint32_t (&weights)[4][4], const float (&shrink)[2],
                          WarpState<kDim>& state) {
#pragma unroll
  for (int j = 0; j < WarpState<kDim>::kPairs; ++j) {
    const int pair = static_cast<int>(threadIdx.x) / 32 + j * kWarps;
    if (pair >= kDim / 16) continue;
#pragma unroll
    for (int i = 0; i < 8; ++i) state.acc[j][i / 4][i % 4] *= shrink[i % 4 / 2];
    AddColumns<T, Cache, kDim>(stage, pair, weights, state.acc[j]);
  }
}

}  // namespace decode
}  // namespace lockstep
