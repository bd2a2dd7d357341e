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

template <typename T, int kDim>
__device__ void StartQueryCopies(const PrefillParams& p, const RowTile& tile, uint32_t to) {
  constexpr int kChunks = kDim / 8;
  const T* const query = static_cast<const T*>(p.rows.query);
#pragma unroll 4
  for (int i = threadIdx.x; i < Layout<kDim>::kRows * kChunks; i += kThreads) {
    const int row = i / kChunks;
    const int chunk = i % kChunks;
    const bool valid = row < tile.num_rows && chunk * 8 < p.kv.head_dim;
    const int64_t from = RowOffset(p, tile, row, p.rows.query_stride) + chunk * 8;
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

// A warp's state: kRowTiles tiles of 16 rows.
template <int kDim>
struct WarpState {
  static constexpr int kRowTiles = Layout<kDim>::kRowTiles;
  float acc[kRowTiles][kDim / 8][4] = {};
  SoftmaxRows rows[kRowTiles];
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

template <typename T, int kDim>
__device__ void AddValues(uint32_t values,
                          const float (&weights)[Layout<kDim>::kRowTiles][kKeys / 8][4],
                          WarpState<kDim>& state) {
  using L = Layout<kDim>;
#pragma unroll
  for (int k = 0; k < kKeys / 16; ++k) {
    uint32_t a[L::kRowTiles][4];
#pragma unroll
    for (int m = 0; m < L::kRowTiles; ++m) PackWeights<T, kKeys>(weights[m], k, a[m]);
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
      const float inverse = InverseSum(state.rows[m], h);
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
    *reinterpret_cast<uint4*>(out + RowOffset(p, tile, row, p.rows.out_stride) + chunk * 8) =
        *reinterpret_cast<const uint4*>(query_memory + row * L::kRowBytes + chunk * 16);
  }
}

template <typename T, int kDim>
__device__ void AttendRowTile(const PrefillParams& p, const RowTile& tile, int32_t kv_head,
                              unsigned char* memory, int32_t (*cache_rows)[kKeys]) {
  using L = Layout<kDim>;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int32_t* const table = TableOf(p, tile);
  const KeyRange keys = KeysOf<kKeys>(p, tile);
  const uint32_t query = SharedAddress(memory);
  const uint32_t stages = query + L::kQueryBytes;

  StartQueryCopies<T, kDim>(p, tile, query);
  if (threadIdx.x < kKeys)
    cache_rows[0][threadIdx.x] = CacheRow<kKeys>(p, keys, table, kv_head, 0, threadIdx.x);
  int32_t next_row = CacheRow<kKeys>(p, keys, table, kv_head, 1, threadIdx.x);
  __syncthreads();
  StartKeyCopies<T, kDim>(p.kv, cache_rows[0], stages);  // one group with Q

  WarpState<kDim> state;
#pragma unroll
  for (int m = 0; m < L::kRowTiles; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      // Rows beyond the tile's (zero queries, not stored) see what its last one sees.
      const int32_t row = min(warp * L::kWarpRows + m * 16 + h * 8 + lane / 4, tile.num_rows - 1);
      state.rows[m].position[h] = tile.Position(tile.first_row + row);
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
      next_row = CacheRow<kKeys>(p, keys, table, kv_head, i + 2, threadIdx.x);
      WaitForCopies<1>();
    } else {
      WaitForCopies<0>();
    }
    __syncthreads();
    const uint32_t stage = stages + i % 2 * 2 * L::kTileBytes;
    float logits[L::kRowTiles][kKeys / 8][4] = {};
    ComputeLogits<T, kDim>(warp_query, stage + LaneOffsetColumnsFirst(lane, L::kRowBytes), logits);
    const int32_t first_key = keys.first_tile + i * kKeys;
    const bool masked = NeedsMask<kKeys>(p, tile, 0, tile.num_rows - 1, first_key);
#pragma unroll
    for (int m = 0; m < L::kRowTiles; ++m) {
      Softmax<kKeys>(p, first_key, masked, logits[m], state.rows[m]);
      if (!state.rows[m].Shrinks()) continue;
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) {
#pragma unroll
        for (int j = 0; j < 4; ++j) state.acc[m][n][j] *= state.rows[m].shrink[j / 2];
      }
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
  AllowSuccessor();
  WaitForPredecessor();
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
