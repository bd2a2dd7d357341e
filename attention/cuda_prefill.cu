// Prefill: rows of chunks over their requests' paged keys and values, on the tensor cores.
//
// FlashAttention-2 (Dao 2023): a block keeps kRows packed query rows (see RowTile) and passes over
// the keys they see in tiles of 64, at multiples of 64. Each of 4 warps has kRows / 4 rows, whose
// logits, maxima, sums and weighted values stay in registers; softmax by parts as in decode. Keys
// of the next tile are copied while this one is computed.
//
// Flops: 4 * D for each (row, visible key). Which tiles a row passes over besides its own (its
// neighbours' of the tile) does not change its bits: such a tile adds exact zeros.
#include "attention/cuda_launch.cuh"
#include "attention/cuda_prefill.cuh"

namespace lockstep {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kKeys = 64;  // of a tile

// D padded to kDim. Two m16 row tiles a warp share each K and V fragment, which halves the reading
// of shared memory, the bottleneck of one; of D = 256 the registers hold only one. Bytes for D =
// 128: Q 128 * 272, K and V 2 * 2 * 64 * 272: 102 KiB, two blocks a multiprocessor.
template <int kDim>
struct Layout {
  static constexpr int kRowTiles = kDim <= 128 ? 2 : 1;  // of 16 rows, a warp
  static constexpr int kWarpRows = 16 * kRowTiles;
  static constexpr int kRows = kWarps * kWarpRows;
  static constexpr int kRowBytes = kDim * 2 + 16;
  static constexpr int kQueryBytes = kRows * kRowBytes;
  static constexpr int kTileBytes = kKeys * kRowBytes;
  static constexpr int kBlockBytes = kQueryBytes + 4 * kTileBytes;  // Q, then 2 stages of K and V
};

// The keys the block's rows see, as tiles.
struct KeyRange {
  int32_t begin;  // visible to some row
  int32_t end;
  int32_t first_tile;  // begin, rounded down to a tile
  int32_t num_tiles;
};

__device__ KeyRange KeysOf(const PrefillParams& p, const RowTile& tile) {
  KeyRange keys;
  keys.begin = LowestVisible(tile.Position(tile.first_row), p.window);
  keys.end = tile.Position(tile.first_row + tile.num_rows - 1) + 1;
  keys.first_tile = keys.begin / kKeys * kKeys;
  keys.num_tiles = (keys.end - keys.first_tile + kKeys - 1) / kKeys;
  return keys;
}

// Cache row of key threadIdx.x of tile i, -1 where no row sees it or there is no such key.
__device__ int32_t CacheRow(const PrefillParams& p, const KeyRange& keys, const int32_t* table,
                            int32_t kv_head, int32_t i) {
  const int32_t key = keys.first_tile + i * kKeys + static_cast<int32_t>(threadIdx.x);
  if (threadIdx.x >= kKeys || key < keys.begin || key >= keys.end) return -1;
  return RowIndex(p.kv, table, key, kv_head);
}

template <typename T, int kDim>
__device__ void StartQueryCopies(const PrefillParams& p, const RowTile& tile, uint32_t to) {
  constexpr int kChunks = kDim / 8;
  const T* const query = static_cast<const T*>(p.rows.query);
#pragma unroll 4
  for (int i = threadIdx.x; i < Layout<kDim>::kRows * kChunks; i += kThreads) {
    const int row = i / kChunks;
    const int chunk = i % kChunks;
    const bool valid = row < tile.num_rows && chunk * 8 < p.kv.head_dim;
    const int32_t packed = tile.first_row + row;
    const int64_t token = tile.first_token + packed / tile.group;
    const int64_t head = tile.first_head + packed % tile.group;
    const int64_t from = token * p.rows.query_stride + head * p.kv.head_dim + chunk * 8;
    CopyAsync16(to + row * Layout<kDim>::kRowBytes + chunk * 16, query + (valid ? from : 0), valid);
  }
}

// Copies of one tile of K and V, as one group; `cache_rows` [64] in shared memory.
template <typename T, int kDim>
__device__ void StartKeyCopies(const PagedKv& kv, const int32_t* cache_rows, uint32_t to) {
  using L = Layout<kDim>;
  constexpr int kChunks = kDim / 8;
#pragma unroll
  for (int j = 0; j < kKeys * kChunks / kThreads; ++j) {
    const int row = (j * kThreads + threadIdx.x) / kChunks;
    const int chunk = (j * kThreads + threadIdx.x) % kChunks;
    const int32_t from_row = cache_rows[row];
    const bool valid = from_row >= 0 && chunk * 8 < kv.head_dim;
    const int64_t from = valid ? int64_t{from_row} * kv.head_dim + chunk * 8 : 0;
    const uint32_t row_to = to + row * L::kRowBytes + chunk * 16;
    CopyAsync16(row_to, static_cast<const T*>(kv.keys) + from, valid);
    CopyAsync16(row_to + L::kTileBytes, static_cast<const T*>(kv.values) + from, valid);
  }
  CommitCopies();
}

// A warp's state: kRowTiles tiles of 16 rows, of which this lane has rows g and g + 8.
template <int kDim>
struct WarpState {
  static constexpr int kRowTiles = Layout<kDim>::kRowTiles;
  float acc[kRowTiles][kDim / 8][4] = {};
  float max[kRowTiles][2];
  float sum[kRowTiles][2] = {};  // this lane's columns only
  int32_t position[kRowTiles][2];
};

template <typename T, int kDim>
__device__ void ComputeLogits(uint32_t query, uint32_t keys,
                              float (&logits)[Layout<kDim>::kRowTiles][kKeys / 8][4]) {
  using L = Layout<kDim>;
#pragma unroll
  for (int k = 0; k < kDim / 16; ++k) {
    uint32_t a[L::kRowTiles][4];
#pragma unroll
    for (int m = 0; m < L::kRowTiles; ++m)
      LoadMatrices(a[m], query + m * 16 * L::kRowBytes + k * 32);
#pragma unroll
    for (int n = 0; n < kKeys / 16; ++n) {
      uint32_t b[4];
      LoadMatrices(b, keys + n * 16 * L::kRowBytes + k * 32);
#pragma unroll
      for (int m = 0; m < L::kRowTiles; ++m) {
        Mma<T>(logits[m][2 * n], a[m], b[0], b[1]);
        Mma<T>(logits[m][2 * n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// Logits of rows m become weights; maxima, sums and weighted values follow.
template <int kDim>
__device__ void SoftmaxRows(const PrefillParams& p, int32_t first_key, bool masked, int m,
                            float (&logits)[kKeys / 8][4], WarpState<kDim>& state) {
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
      const int32_t position = state.position[m][h];
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
  float shrink[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float max = state.max[m][h];
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
      max = fmaxf(max, fmaxf(logits[n][2 * h], logits[n][2 * h + 1]));
    }
    max = fmaxf(max, __shfl_xor_sync(kFullWarp, max, 1));
    max = fmaxf(max, __shfl_xor_sync(kFullWarp, max, 2));
    const float offset = max == -INFINITY ? 0.0f : max * factor;
    shrink[h] = max == state.max[m][h] ? 1.0f : Exp2(fmaf(state.max[m][h], factor, -offset));
    state.max[m][h] = max;
    float sum = state.sum[m][h] * shrink[h];
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
      for (int j = 2 * h; j < 2 * h + 2; ++j) {
        logits[n][j] = Exp2(fmaf(logits[n][j], factor, -offset));
        sum += logits[n][j];
      }
    }
    state.sum[m][h] = sum;
  }
  // Multiplying by 1 changes nothing, so leaving it out does not either.
  if (!__any_sync(kFullWarp, shrink[0] != 1.0f || shrink[1] != 1.0f)) return;
#pragma unroll
  for (int n = 0; n < kDim / 8; ++n) {
#pragma unroll
    for (int j = 0; j < 4; ++j) state.acc[m][n][j] *= shrink[j / 2];
  }
}

template <typename T, int kDim>
__device__ void AddValues(uint32_t values,
                          const float (&weights)[Layout<kDim>::kRowTiles][kKeys / 8][4],
                          WarpState<kDim>& state) {
  using L = Layout<kDim>;
#pragma unroll
  for (int k = 0; k < kKeys / 16; ++k) {
    uint32_t a[L::kRowTiles][4];
#pragma unroll
    for (int m = 0; m < L::kRowTiles; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float(&w)[4] = weights[m][2 * k + i / 2];
        a[m][i] = Pack<T>(w[i % 2 * 2], w[i % 2 * 2 + 1]);
      }
    }
#pragma unroll
    for (int n = 0; n < kDim / 16; ++n) {
      uint32_t b[4];
      LoadMatricesTransposed(b, values + k * 16 * L::kRowBytes + n * 32);
#pragma unroll
      for (int m = 0; m < L::kRowTiles; ++m) {
        Mma<T>(state.acc[m][2 * n], a[m], b[0], b[1]);
        Mma<T>(state.acc[m][2 * n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// The warp's rows, divided by their sums, through its own rows of Q's memory to `out`.
template <typename T, int kDim>
__device__ void StoreRows(const PrefillParams& p, const RowTile& tile, unsigned char* query_memory,
                          const WarpState<kDim>& state) {
  using L = Layout<kDim>;
  constexpr int kChunks = kDim / 8;
  const int lane = threadIdx.x % 32;
  const int first_row = threadIdx.x / 32 * L::kWarpRows;
  __syncwarp();  // other lanes have read the warp's rows of Q
#pragma unroll
  for (int m = 0; m < L::kRowTiles; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float sum = state.sum[m][h];
      sum += __shfl_xor_sync(kFullWarp, sum, 1);
      sum += __shfl_xor_sync(kFullWarp, sum, 2);
      const float inverse = 1.0f / sum;
      unsigned char* const to =
          query_memory + (first_row + m * 16 + h * 8 + lane / 4) * L::kRowBytes + lane % 4 * 4;
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) {
        *reinterpret_cast<uint32_t*>(to + n * 16) =
            Pack<T>(state.acc[m][n][2 * h] * inverse, state.acc[m][n][2 * h + 1] * inverse);
      }
    }
  }
  __syncwarp();
  T* const out = static_cast<T*>(p.rows.out);
  for (int i = lane; i < L::kWarpRows * kChunks; i += 32) {
    const int row = first_row + i / kChunks;
    const int chunk = i % kChunks;
    if (row >= tile.num_rows || chunk * 8 >= p.kv.head_dim) continue;
    const int32_t packed = tile.first_row + row;
    const int64_t token = tile.first_token + packed / tile.group;
    const int64_t head = tile.first_head + packed % tile.group;
    *reinterpret_cast<uint4*>(out + token * p.rows.out_stride + head * p.kv.head_dim + chunk * 8) =
        *reinterpret_cast<const uint4*>(query_memory + row * L::kRowBytes + chunk * 16);
  }
}

// A tile where every row sees every key needs no mask.
__device__ bool NeedsMask(const PrefillParams& p, const RowTile& tile, int32_t first_key) {
  const int32_t first_position = tile.Position(tile.first_row);
  const int32_t last_position = tile.Position(tile.first_row + tile.num_rows - 1);
  return first_key + kKeys - 1 > first_position ||
         first_key < LowestVisible(last_position, p.window);
}

template <typename T, int kDim>
__device__ void AttendRowTile(const PrefillParams& p, const RowTile& tile, int32_t kv_head,
                              unsigned char* memory, int32_t (*cache_rows)[kKeys]) {
  using L = Layout<kDim>;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int64_t table_row = p.table_rows != nullptr ? p.table_rows[tile.request] : tile.request;
  const int32_t* const table = p.kv.block_tables + table_row * p.kv.max_blocks;
  const KeyRange keys = KeysOf(p, tile);
  const uint32_t query = SharedAddress(memory);
  const uint32_t stages = query + L::kQueryBytes;

  StartQueryCopies<T, kDim>(p, tile, query);
  if (threadIdx.x < kKeys) cache_rows[0][threadIdx.x] = CacheRow(p, keys, table, kv_head, 0);
  int32_t next_row = CacheRow(p, keys, table, kv_head, 1);
  __syncthreads();
  StartKeyCopies<T, kDim>(p.kv, cache_rows[0], stages);  // one group with Q

  WarpState<kDim> state;
#pragma unroll
  for (int m = 0; m < L::kRowTiles; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      // Rows beyond the tile's (zero queries, not stored) see what its last one sees.
      const int32_t row = min(warp * L::kWarpRows + m * 16 + h * 8 + lane / 4, tile.num_rows - 1);
      state.position[m][h] = tile.Position(tile.first_row + row);
      state.max[m][h] = -INFINITY;
    }
  }
  const uint32_t warp_query =
      query + warp * L::kWarpRows * L::kRowBytes + LaneOffsetRowsFirst(lane, L::kRowBytes);
  for (int32_t i = 0; i < keys.num_tiles; ++i) {
    if (threadIdx.x < kKeys) cache_rows[(i + 1) % 2][threadIdx.x] = next_row;
    __syncthreads();  // also: all warps are done with tile i - 1, whose stage is filled next
    if (i + 1 < keys.num_tiles) {
      StartKeyCopies<T, kDim>(p.kv, cache_rows[(i + 1) % 2],
                              stages + (i + 1) % 2 * 2 * L::kTileBytes);
      next_row = CacheRow(p, keys, table, kv_head, i + 2);
      WaitForCopies<1>();
    } else {
      WaitForCopies<0>();
    }
    __syncthreads();
    const uint32_t stage = stages + i % 2 * 2 * L::kTileBytes;
    float logits[L::kRowTiles][kKeys / 8][4] = {};
    ComputeLogits<T, kDim>(warp_query, stage + LaneOffsetColumnsFirst(lane, L::kRowBytes), logits);
    const int32_t first_key = keys.first_tile + i * kKeys;
    const bool masked = NeedsMask(p, tile, first_key);
#pragma unroll
    for (int m = 0; m < L::kRowTiles; ++m) {
      SoftmaxRows<kDim>(p, first_key, masked, m, logits[m], state);
    }
    AddValues<T, kDim>(stage + L::kTileBytes + LaneOffsetRowsFirst(lane, L::kRowBytes), logits,
                       state);
  }
  StoreRows<T, kDim>(p, tile, memory, state);
}

// Grid: row tiles, the last ones (which see most) first; KV heads.
template <typename T, int kDim>
__global__ void __launch_bounds__(kThreads, kDim <= 128 ? 2 : 1)
    PrefillKernel(const __grid_constant__ PrefillParams p) {
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ int32_t cache_rows[2][kKeys];
  WaitForPredecessor();
  AllowSuccessor();
  if (p.zero_padding_rows != 0) {
    const int64_t block = int64_t{blockIdx.y} * gridDim.x + blockIdx.x;
    ZeroRows<T>(p.rows, p.kv.head_dim, p.query_start_loc[p.num_requests],
                block * kThreads + threadIdx.x, int64_t{gridDim.x} * gridDim.y * kThreads);
  }
  const int32_t kv_head = static_cast<int32_t>(blockIdx.y);
  const RowTile tile = FindRowTile<Layout<kDim>::kRows>(
      p, static_cast<int32_t>(gridDim.x - 1 - blockIdx.x), kv_head, kThreads);
  if (tile.request < 0) return;
  AttendRowTile<T, kDim>(p, tile, kv_head, memory, cache_rows);
}

// ---- Host ---------------------------------------------------------------------------------------

// fn(T{}, std::integral_constant<int, kDim>{}) for the smallest kDim that holds head_dim.
template <typename T, typename Fn>
absl::Status WithDim(int64_t head_dim, Fn fn) {
  if (head_dim <= 64) return fn(T{}, std::integral_constant<int, 64>{});
  if (head_dim <= 80) return fn(T{}, std::integral_constant<int, 80>{});
  if (head_dim <= 96) return fn(T{}, std::integral_constant<int, 96>{});
  if (head_dim <= 128) return fn(T{}, std::integral_constant<int, 128>{});
  LOCKSTEP_CHECK(head_dim <= kMaxTensorCoreHeadDim);
  return fn(T{}, std::integral_constant<int, 256>{});
}

template <typename Fn>
absl::Status WithTypes(DType dtype, int64_t head_dim, Fn fn) {
  LOCKSTEP_CHECK(dtype != DType::kF32);
  if (dtype == DType::kF16) return WithDim<__half>(head_dim, fn);
  return WithDim<__nv_bfloat16>(head_dim, fn);
}

}  // namespace

absl::Status PreparePrefill(DType dtype, int64_t head_dim) {
  return WithTypes(dtype, head_dim, [](auto type, auto dim) -> absl::Status {
    constexpr int kDim = decltype(dim)::value;
    LOCKSTEP_CUDA(cudaFuncSetAttribute(PrefillKernel<decltype(type), kDim>,
                                       cudaFuncAttributeMaxDynamicSharedMemorySize,
                                       Layout<kDim>::kBlockBytes));
    return absl::OkStatus();
  });
}

absl::Status LaunchPrefill(const PrefillParams& params, DType dtype, bool programmatic,
                           CudaStream stream) {
  return WithTypes(dtype, params.kv.head_dim, [&](auto type, auto dim) -> absl::Status {
    constexpr int kDim = decltype(dim)::value;
    constexpr int kRows = Layout<kDim>::kRows;
    const int64_t tiles =
        int64_t{params.rows.num_tokens} * params.largest_group / kRows + params.num_requests;
    const dim3 grid(static_cast<unsigned>(tiles), static_cast<unsigned>(params.kv.num_kv_heads));
    return LaunchKernel(PrefillKernel<decltype(type), kDim>, grid, kThreads,
                        Layout<kDim>::kBlockBytes, params, programmatic, stream,
                        "launch of prefill attention");
  });
}

}  // namespace lockstep
