// Decode: one query row per request over its paged keys and values; memory-bound, so everything is
// arranged for a steady stream of 16-byte copies.
//
// Floor: bytes of the K and V rows read, 2 * Hkv * D * 2 * sum of seq_lens, over memory bandwidth.
//
// A work item is one part of one request's keys (DecodeItem) for one head tile: all query heads of
// a KV head (up to 16), which are the 16 rows of the tensor-core products. A block of 4 warps takes
// an item; a warp takes every fourth tile of 16 keys, with its own ring of shared memory, and keeps
// its own maximum, sum and weighted values (Milakov and Gimelshein 2018, "Online normalizer
// calculation for softmax"), so warps meet only at the end of an item. Per tile: 16 x 16 logits =
// Q [16, D] K^T in D / 16 steps, 16 x D values in one. The warps' results are added in order.
//
// A request of several parts: each block leaves its weighted values in `partials`; the one that
// arrives last merges all in ascending order (flash decoding, Dao et al. 2023), so the result does
// not depend on which that is.
#include "attention/cuda_device_code.cuh"
#include "attention/cuda_launch.cuh"

namespace lockstep {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;

// D padded to kDim. A ring stage is 16 rows of K, then 16 of V; 16 bytes after each row make 8
// rows' equal columns fall into different banks. Three stages of D = 128: 4 * 3 * 8704 bytes = 102
// KiB a block, two blocks a multiprocessor, 139 KiB of copies under way on each where 4.5 TB/s and
// 1 us of latency take 34 KiB.
template <int kDim>
struct Layout {
  static constexpr int kStages = kDim <= 64 ? 4 : 3;
  static constexpr int kRowBytes = kDim * 2 + 16;
  static constexpr int kTileBytes = kDecodeKeyTile * kRowBytes;
  static constexpr int kStageBytes = 2 * kTileBytes;
  static constexpr int kWarpBytes = kStages * kStageBytes;
  static constexpr int kBlockBytes = kWarps * kWarpBytes;
  // At the end of an item a warp's ring holds its results: [16, kAccRow] values, [16] maxima, [16]
  // sums. 8 floats more a row spread the rows over the banks.
  static constexpr int kAccRow = kDim + 8;
  static_assert((kDecodeHeadTile * kAccRow + 2 * kDecodeHeadTile) * 4 <= kWarpBytes);
};

struct RowState {
  float max[2] = {-INFINITY, -INFINITY};  // of products or capped logits, rows g and g + 8
  float sum[2] = {0, 0};                  // this lane's columns only
};

// The warp's ring of copies for one item.
template <typename T, int kDim>
struct Ring {
  using L = Layout<kDim>;

  const DecodeParams& p;
  const DecodeItem& item;
  const int32_t* table;
  int32_t kv_head;
  int32_t first_key;  // of the warp's first tile
  int32_t num_tiles;  // the warp's
  uint32_t base;      // shared address

  // Lane j < 16: the cache row of key j of tile i; -1 where there is none to read.
  __device__ int32_t CacheRow(int32_t i) const {
    const int lane = threadIdx.x % 32;
    const int32_t key = first_key + i * kWarps * kDecodeKeyTile + lane;
    if (lane >= kDecodeKeyTile || i >= num_tiles || key < item.key_begin || key >= item.key_end) {
      return -1;
    }
    return RowIndex(p.kv, table, key, kv_head);
  }

  // Starts the copies of a tile, given what CacheRow returned for it; always one group.
  __device__ void Start(int32_t i, int32_t cache_row) const {
    constexpr int kChunks = kDim / 8;
    if (i < num_tiles) {
      const int lane = threadIdx.x % 32;
      const uint32_t stage = base + i % L::kStages * L::kStageBytes;
#pragma unroll
      for (int j = 0; j < kDecodeKeyTile * kChunks / 32; ++j) {
        const int row = (j * 32 + lane) / kChunks;
        const int chunk = (j * 32 + lane) % kChunks;
        const int32_t from_row = __shfl_sync(kFullWarp, cache_row, row);
        const bool valid = from_row >= 0 && chunk * 8 < p.kv.head_dim;
        const int64_t from = valid ? int64_t{from_row} * p.kv.head_dim + chunk * 8 : 0;
        const uint32_t to = stage + row * L::kRowBytes + chunk * 16;
        CopyAsync16(to, static_cast<const T*>(p.kv.keys) + from, valid);
        CopyAsync16(to + L::kTileBytes, static_cast<const T*>(p.kv.values) + from, valid);
      }
    }
    CommitCopies();
  }
};

// Query heads of the tile as A fragments; rows beyond num_heads and columns beyond head_dim are 0.
template <typename T, int kDim>
__device__ void LoadQuery(const DecodeParams& p, const DecodeItem& item, const DecodeHeadTile& tile,
                          uint32_t (&query)[kDim / 16][4]) {
  const int lane = threadIdx.x % 32;
  const int32_t dim = p.kv.head_dim;
  const T* const rows = static_cast<const T*>(p.rows.query) + item.row * p.rows.query_stride +
                        int64_t{tile.first_head} * dim;
#pragma unroll
  for (int k = 0; k < kDim / 16; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = lane / 4 + i % 2 * 8;
      const int column = k * 16 + lane % 4 * 2 + i / 2 * 8;
      query[k][i] = row < tile.num_heads && column < dim
                        ? *reinterpret_cast<const uint32_t*>(rows + row * dim + column)
                        : 0u;
    }
  }
}

// One tile of 16 keys, of which [begin, end) are visible.
template <typename T, int kDim>
__device__ void AttendTile(const LogitScale& scale, const uint32_t (&query)[kDim / 16][4],
                           uint32_t stage, int32_t begin, int32_t end, float (&acc)[kDim / 8][4],
                           RowState& state) {
  using L = Layout<kDim>;
  const int lane = threadIdx.x % 32;
  float logits[2][4] = {};
  const uint32_t keys = stage + LaneOffsetColumnsFirst(lane, L::kRowBytes);
#pragma unroll
  for (int k = 0; k < kDim / 16; ++k) {
    uint32_t b[4];
    LoadMatrices(b, keys + k * 32);
    Mma<T>(logits[0], query[k], b[0], b[1]);
    Mma<T>(logits[1], query[k], b[2], b[3]);
  }
  const bool capped = scale.cap_output != 0;
  const float factor = capped ? 1.0f : scale.factor;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float& logit = logits[i / 4][i % 4];
    if (capped) logit = Capped(scale, logit);
    const int key = i / 4 * 8 + lane % 4 * 2 + i % 2;
    if (key < begin || key >= end) logit = -INFINITY;
  }
  float shrink[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float max = fmaxf(fmaxf(logits[0][2 * h], logits[0][2 * h + 1]),
                      fmaxf(logits[1][2 * h], logits[1][2 * h + 1]));
    max = fmaxf(max, __shfl_xor_sync(kFullWarp, max, 1));
    max = fmaxf(max, __shfl_xor_sync(kFullWarp, max, 2));
    max = fmaxf(max, state.max[h]);
    const float offset = max == -INFINITY ? 0.0f : max * factor;
    shrink[h] = max == state.max[h] ? 1.0f : Exp2(fmaf(state.max[h], factor, -offset));
    state.max[h] = max;
    state.sum[h] *= shrink[h];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int j = 2 * h; j < 2 * h + 2; ++j) {
        logits[n][j] = Exp2(fmaf(logits[n][j], factor, -offset));
        state.sum[h] += logits[n][j];
      }
    }
  }
  // Multiplying by 1 changes nothing, so leaving it out does not either.
  if (__any_sync(kFullWarp, shrink[0] != 1.0f || shrink[1] != 1.0f)) {
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      acc[n][0] *= shrink[0];
      acc[n][1] *= shrink[0];
      acc[n][2] *= shrink[1];
      acc[n][3] *= shrink[1];
    }
  }
  const uint32_t weights[4] = {
      Pack<T>(logits[0][0], logits[0][1]), Pack<T>(logits[0][2], logits[0][3]),
      Pack<T>(logits[1][0], logits[1][1]), Pack<T>(logits[1][2], logits[1][3])};
  const uint32_t values = stage + L::kTileBytes + LaneOffsetRowsFirst(lane, L::kRowBytes);
#pragma unroll
  for (int n = 0; n < kDim / 16; ++n) {
    uint32_t b[4];
    LoadMatricesTransposed(b, values + n * 32);
    Mma<T>(acc[2 * n], weights, b[0], b[1]);
    Mma<T>(acc[2 * n + 1], weights, b[2], b[3]);
  }
}

// The warp's part of the item; its results go to its own ring.
template <typename T, int kDim>
__device__ void AttendPart(const DecodeParams& p, const DecodeItem& item,
                           const DecodeHeadTile& tile, unsigned char* warp_memory) {
  using L = Layout<kDim>;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int32_t first_key = item.key_begin / kDecodeKeyTile * kDecodeKeyTile;
  const int32_t tiles = (item.key_end - first_key + kDecodeKeyTile - 1) / kDecodeKeyTile;
  const Ring<T, kDim> ring = {.p = p,
                              .item = item,
                              .table = p.kv.block_tables + item.table_row * p.kv.max_blocks,
                              .kv_head = tile.kv_head,
                              .first_key = first_key + warp * kDecodeKeyTile,
                              .num_tiles = tiles > warp ? (tiles - warp + kWarps - 1) / kWarps : 0,
                              .base = SharedAddress(warp_memory)};
  int32_t cache_rows[L::kStages];
#pragma unroll
  for (int i = 0; i < L::kStages; ++i) cache_rows[i] = ring.CacheRow(i);
#pragma unroll
  for (int i = 0; i < L::kStages - 1; ++i) ring.Start(i, cache_rows[i]);
  int32_t next_rows = cache_rows[L::kStages - 1];

  uint32_t query[kDim / 16][4];
  LoadQuery<T, kDim>(p, item, tile, query);
  float acc[kDim / 8][4] = {};
  RowState state;
  for (int32_t i = 0; i < ring.num_tiles; ++i) {
    ring.Start(i + L::kStages - 1, next_rows);  // into the stage of tile i - 1
    next_rows = ring.CacheRow(i + L::kStages);
    WaitForCopies<L::kStages - 1>();
    __syncwarp();
    const int32_t key = ring.first_key + i * kWarps * kDecodeKeyTile;
    AttendTile<T, kDim>(p.scale, query, ring.base + i % L::kStages * L::kStageBytes,
                        item.key_begin - key, item.key_end - key, acc, state);
    __syncwarp();  // all lanes have read the stage
  }
  WaitForCopies<0>();
  __syncwarp();
  float* const values = reinterpret_cast<float*>(warp_memory);
  float* const stats = values + kDecodeHeadTile * L::kAccRow;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = lane / 4 + h * 8;
    float sum = state.sum[h];
    sum += __shfl_xor_sync(kFullWarp, sum, 1);
    sum += __shfl_xor_sync(kFullWarp, sum, 2);
    if (lane % 4 == 0) {
      stats[row] = state.max[h] * (p.scale.cap_output != 0 ? 1.0f : p.scale.factor);
      stats[kDecodeHeadTile + row] = sum;
    }
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      *reinterpret_cast<float2*>(values + row * L::kAccRow + n * 8 + lane % 4 * 2) =
          make_float2(acc[n][2 * h], acc[n][2 * h + 1]);
    }
  }
}

template <typename T>
__device__ void StoreOutput(const DecodeParams& p, int32_t row, int32_t head, int32_t column,
                            float4 value) {
  T* const to = static_cast<T*>(p.rows.out) + row * p.rows.out_stride +
                int64_t{head} * p.kv.head_dim + column;
  *reinterpret_cast<uint2*>(to) = make_uint2(Pack<T>(value.x, value.y), Pack<T>(value.z, value.w));
}

__device__ void AddScaled(float4& sum, const float4& value, float weight) {
  sum.x = fmaf(value.x, weight, sum.x);
  sum.y = fmaf(value.y, weight, sum.y);
  sum.z = fmaf(value.z, weight, sum.z);
  sum.w = fmaf(value.w, weight, sum.w);
}

// Row of partials of (request, head), of which each split has head_dim floats.
__device__ int64_t PartialRow(const DecodeParams& p, const DecodeItem& item, int32_t head) {
  return (int64_t{item.request} * p.rows.num_query_heads + head) * p.max_splits;
}

// Adds the warps' results in order: the output where the item is all of the request, else a
// partial.
template <typename T, int kDim>
__device__ void MergeWarps(const DecodeParams& p, const DecodeItem& item,
                           const DecodeHeadTile& tile, const unsigned char* memory) {
  using L = Layout<kDim>;
  constexpr int kQuads = kDim / 4;
  for (int i = threadIdx.x; i < tile.num_heads * kQuads; i += kThreads) {
    const int row = i / kQuads;
    const int column = i % kQuads * 4;
    if (column >= p.kv.head_dim) continue;
    const float* warp_values[kWarps];
    float max = -INFINITY;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      warp_values[w] = reinterpret_cast<const float*>(memory + w * L::kWarpBytes);
      max = fmaxf(max, warp_values[w][kDecodeHeadTile * L::kAccRow + row]);
    }
    const float offset = max == -INFINITY ? 0.0f : max;
    float4 value = make_float4(0, 0, 0, 0);
    float sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float* const stats = warp_values[w] + kDecodeHeadTile * L::kAccRow;
      const float weight = Exp2(stats[row] - offset);
      sum = fmaf(stats[kDecodeHeadTile + row], weight, sum);
      AddScaled(value, *reinterpret_cast<const float4*>(warp_values[w] + row * L::kAccRow + column),
                weight);
    }
    const int32_t head = tile.first_head + row;
    if (item.num_splits == 1) {
      // Without any key (a padding request) the row is zero.
      const float inverse = item.key_end > item.key_begin ? 1.0f / sum : 0.0f;
      StoreOutput<T>(
          p, item.row, head, column,
          make_float4(value.x * inverse, value.y * inverse, value.z * inverse, value.w * inverse));
      continue;
    }
    const int64_t partial = PartialRow(p, item, head) + item.split;
    *reinterpret_cast<float4*>(p.partials + partial * p.kv.head_dim + column) = value;
    if (column == 0) {
      *reinterpret_cast<float2*>(p.partial_stats + 2 * partial) = make_float2(max, sum);
    }
  }
}

// The block that arrives last merges the request's parts, in order.
template <typename T, int kDim>
__device__ void MergeParts(const DecodeParams& p, const DecodeItem& item,
                           const DecodeHeadTile& tile, float (*weights)[kMaxSplits]) {
  const int lane = threadIdx.x % 32;
  for (int row = threadIdx.x / 32; row < tile.num_heads; row += kWarps) {
    const float* const stats = p.partial_stats + 2 * PartialRow(p, item, tile.first_head + row);
    float maxima[kMaxSplits / 32];
    float sums[kMaxSplits / 32];
    float max = -INFINITY;
#pragma unroll
    for (int j = 0; j < kMaxSplits / 32; ++j) {
      const int split = lane + 32 * j;
      float2 pair = make_float2(-INFINITY, 0);
      if (split < item.num_splits) {
        pair = __ldcg(reinterpret_cast<const float2*>(stats + 2 * split));
      }
      maxima[j] = pair.x;
      sums[j] = pair.y;
      max = fmaxf(max, pair.x);
    }
    for (int step = 16; step > 0; step /= 2) {
      max = fmaxf(max, __shfl_xor_sync(kFullWarp, max, step));
    }
    const float offset = max == -INFINITY ? 0.0f : max;
    float total = 0;
#pragma unroll
    for (int j = 0; j < kMaxSplits / 32; ++j) {
      maxima[j] = Exp2(maxima[j] - offset);
      total = fmaf(sums[j], maxima[j], total);
    }
    for (int step = 16; step > 0; step /= 2) total += __shfl_xor_sync(kFullWarp, total, step);
#pragma unroll
    for (int j = 0; j < kMaxSplits / 32; ++j) weights[row][lane + 32 * j] = maxima[j] / total;
  }
  __syncthreads();
  constexpr int kQuads = kDim / 4;
  for (int i = threadIdx.x; i < tile.num_heads * kQuads; i += kThreads) {
    const int row = i / kQuads;
    const int column = i % kQuads * 4;
    if (column >= p.kv.head_dim) continue;
    const int32_t head = tile.first_head + row;
    const float* const values = p.partials + PartialRow(p, item, head) * p.kv.head_dim + column;
    float4 value = make_float4(0, 0, 0, 0);
#pragma unroll 8
    for (int split = 0; split < item.num_splits; ++split) {
      AddScaled(value, __ldcg(reinterpret_cast<const float4*>(values + split * p.kv.head_dim)),
                weights[row][split]);
    }
    StoreOutput<T>(p, item.row, head, column, value);
  }
}

// True in all threads of the block that arrives last for its request and head tile.
__device__ bool ArriveLast(const DecodeParams& p, const DecodeItem& item, int32_t tile_index,
                           int* shared_flag) {
  __threadfence();  // the partials, before the arrival
  __syncthreads();
  if (threadIdx.x == 0) {
    int32_t* const arrivals = p.arrivals + int64_t{item.request} * p.num_head_tiles + tile_index;
    const bool last = atomicAdd(arrivals, 1) == item.num_splits - 1;
    if (last) *arrivals = 0;  // for the next launch
    *shared_flag = last;
  }
  __syncthreads();
  const bool last = *shared_flag != 0;
  if (last) __threadfence();  // the arrivals, before the others' partials
  return last;
}

template <typename T, int kDim>
__global__ void __launch_bounds__(kThreads) DecodeKernel(const __grid_constant__ DecodeParams p) {
  using L = Layout<kDim>;
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ float weights[kDecodeHeadTile][kMaxSplits];
  __shared__ int is_last;
  WaitForPredecessor();
  AllowSuccessor();
  const auto* const items = reinterpret_cast<const DecodeItem*>(p.plan + 1);
  const int64_t total = int64_t{p.plan->num_items} * p.num_head_tiles;
  ZeroRows<T>(p.rows, p.kv.head_dim, p.plan->num_rows, int64_t{blockIdx.x} * kThreads + threadIdx.x,
              int64_t{gridDim.x} * kThreads);
  for (int64_t work = blockIdx.x; work < total; work += gridDim.x) {
    const DecodeItem item = items[work / p.num_head_tiles];
    const int32_t tile_index = static_cast<int32_t>(work % p.num_head_tiles);
    const DecodeHeadTile tile = p.head_tiles[tile_index];
    AttendPart<T, kDim>(p, item, tile, memory + threadIdx.x / 32 * L::kWarpBytes);
    __syncthreads();
    MergeWarps<T, kDim>(p, item, tile, memory);
    if (item.num_splits > 1 && ArriveLast(p, item, tile_index, &is_last)) {
      MergeParts<T, kDim>(p, item, tile, weights);
    }
    __syncthreads();  // memory and weights have been read
  }
}

// ---- Host ---------------------------------------------------------------------------------------

// fn(T{}, std::integral_constant<int, kDim>{}) for the smallest kDim that holds head_dim.
template <typename T, typename Fn>
auto WithDim(int64_t head_dim, Fn fn) {
  if (head_dim <= 64) return fn(T{}, std::integral_constant<int, 64>{});
  if (head_dim <= 80) return fn(T{}, std::integral_constant<int, 80>{});
  if (head_dim <= 96) return fn(T{}, std::integral_constant<int, 96>{});
  if (head_dim <= 128) return fn(T{}, std::integral_constant<int, 128>{});
  LOCKSTEP_CHECK(head_dim <= kMaxTensorCoreHeadDim);
  return fn(T{}, std::integral_constant<int, 256>{});
}

template <typename Fn>
auto WithTypes(DType dtype, int64_t head_dim, Fn fn) {
  LOCKSTEP_CHECK(dtype != DType::kF32);
  if (dtype == DType::kF16) return WithDim<__half>(head_dim, fn);
  return WithDim<__nv_bfloat16>(head_dim, fn);
}

}  // namespace

absl::StatusOr<int> PrepareDecode(DType dtype, int64_t head_dim) {
  return WithTypes(dtype, head_dim, [](auto type, auto dim) -> absl::StatusOr<int> {
    constexpr int kDim = decltype(dim)::value;
    constexpr int kBytes = Layout<kDim>::kBlockBytes;
    const auto kernel = DecodeKernel<decltype(type), kDim>;
    LOCKSTEP_CUDA(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
    int device = 0;
    int multiprocessors = 0;
    int blocks = 0;
    LOCKSTEP_CUDA(cudaGetDevice(&device));
    LOCKSTEP_CUDA(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
    LOCKSTEP_CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, kThreads, kBytes));
    if (blocks < 1) {
      return absl::FailedPreconditionError(absl::StrFormat(
          "the decode attention kernel for head_dim %d needs %d bytes of shared memory: more than "
          "this device has",
          kDim, kBytes));
    }
    return multiprocessors * blocks;
  });
}

absl::Status LaunchDecode(const DecodeParams& params, DType dtype, int64_t num_blocks,
                          bool programmatic, CudaStream stream) {
  return WithTypes(dtype, params.kv.head_dim, [&](auto type, auto dim) -> absl::Status {
    constexpr int kDim = decltype(dim)::value;
    return LaunchKernel(DecodeKernel<decltype(type), kDim>, dim3(static_cast<unsigned>(num_blocks)),
                        kThreads, Layout<kDim>::kBlockBytes, params, programmatic, stream,
                        "launch of decode attention");
  });
}

}  // namespace lockstep
