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
//
// Rows of an fp8 cache are an odd number of 16 bytes apart, as those of the others are.
template <typename Cache, int kDim>
struct Layout {
  static constexpr int kRowTiles = kDim <= 128 ? 2 : 1;  // of 16 rows, a warp
  static constexpr int kWarpRows = 16 * kRowTiles;
  static constexpr int kRows = kWarps * kWarpRows;
  static constexpr int kQueryRowBytes = kDim * 2 + 16;
  static constexpr int kPiece = 16 / sizeof(Cache);  // elements
  static constexpr int kPieces = kDim / kPiece;      // of a row of the cache
  static constexpr int kRowBytes = (kPieces % 2 == 1 ? kPieces : kPieces + 1) * 16;
  static constexpr int kQueryBytes = kRows * kQueryRowBytes;
  static constexpr int kTileBytes = kKeys * kRowBytes;
  static constexpr int kBlockBytes = kQueryBytes + 4 * kTileBytes;  // Q, then 2 stages of K and V
};

template <typename T, typename Cache, int kDim>
__device__ void StartQueryCopies(const PrefillParams& p, const RowTile& tile, uint32_t to) {
  using L = Layout<Cache, kDim>;
  constexpr int kChunks = kDim / 8;
  const T* const query = static_cast<const T*>(p.rows.query);
#pragma unroll 4
  for (int i = threadIdx.x; i < L::kRows * kChunks; i += kThreads) {
    const int row = i / kChunks;
    const int chunk = i % kChunks;
    const bool valid = row < tile.num_rows && chunk * 8 < p.kv.head_dim;
    const int64_t from = RowOffset(p, tile, row, p.rows.query_stride) + chunk * 8;
    CopyAsync16(to + row * L::kQueryRowBytes + chunk * 16, query + (valid ? from : 0), valid);
  }
}

// Copies of one tile of K and V, as one group; `cache_rows` [64] in shared memory.
template <typename Cache, int kDim>
__device__ void StartKeyCopies(const PagedKv& kv, const int32_t* cache_rows, uint32_t to) {
  using L = Layout<Cache, kDim>;
  constexpr int kCopies = kKeys * L::kPieces;
#pragma unroll
  for (int j = 0; j < (kCopies + kThreads - 1) / kThreads; ++j) {
    const unsigned i = j * kThreads + threadIdx.x;
    if (kCopies % kThreads != 0 && i >= kCopies) break;
    const int row = static_cast<int>(i / L::kPieces);
    const int piece = static_cast<int>(i % L::kPieces);
    const int32_t from_row = cache_rows[row];
    const bool valid = from_row >= 0 && piece * L::kPiece < kv.head_dim;
    const int64_t from = valid ? int64_t{from_row} * kv.head_dim + piece * L::kPiece : 0;
    const uint32_t row_to = to + row * L::kRowBytes + piece * 16;
    CopyAsync16(row_to, static_cast<const Cache*>(kv.keys) + from, valid);
    CopyAsync16(row_to + L::kTileBytes, static_cast<const Cache*>(kv.values) + from, valid);
  }
  CommitCopies();
}

// A warp's state: kRowTiles tiles of 16 rows.
template <typename Cache, int kDim>
struct WarpState {
  static constexpr int kRowTiles = Layout<Cache, kDim>::kRowTiles;
  float acc[kRowTiles][kDim / 8][4] = {};
  SoftmaxRows rows[kRowTiles];
  float unscale[kRowTiles][2];  // beside an fp8 cache: what logits are to be multiplied with
};

// Beside an fp8 cache: the warp's queries become float16, and of each 16 numbers those that a lane
// has of the keys, 4 c to 4 c + 3, go to places 2 c, 2 c + 1, 2 c + 8 and 2 c + 9. A lane a row.
template <typename T, typename Cache, int kDim>
__device__ void PrepareQuery(unsigned char* query_memory, WarpState<Cache, kDim>& state) {
  using L = Layout<Cache, kDim>;
  static_assert(L::kWarpRows <= 32);
  const int lane = threadIdx.x % 32;
  auto* const row = reinterpret_cast<uint4*>(
      query_memory + (static_cast<int>(threadIdx.x) / 32 * L::kWarpRows + lane % L::kWarpRows) *
                         L::kQueryRowBytes);
  float largest = 0;
#pragma unroll 4
  for (int i = 0; i < kDim / 8; ++i) {
    const uint4 eight = row[i];
    largest = fmaxf(largest, fmaxf(LargerOfPair<T>(eight.x), LargerOfPair<T>(eight.y)));
    largest = fmaxf(largest, fmaxf(LargerOfPair<T>(eight.z), LargerOfPair<T>(eight.w)));
  }
  const QueryScale scale(largest);
  const auto pair = [&scale](uint32_t x) { return QueryPair<T>(x, scale.up); };
  __syncwarp();  // where lanes share a row, all have its largest
  if (lane < L::kWarpRows) {
#pragma unroll 4
    for (int i = 0; i < kDim / 8; i += 2) {
      const uint4 a = row[i];
      const uint4 b = row[i + 1];
      row[i] = make_uint4(pair(a.x), pair(a.z), pair(b.x), pair(b.z));
      row[i + 1] = make_uint4(pair(a.y), pair(a.w), pair(b.y), pair(b.w));
    }
  }
#pragma unroll
  for (int m = 0; m < L::kRowTiles; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      state.unscale[m][h] = __shfl_sync(kFullWarp, std::is_same_v<T, __half> ? 1.0f : scale.down,
                                        m * 16 + h * 8 + lane / 4);
    }
  }
  __syncwarp();
}

// Where this lane's addresses for LoadMatrices are in a stage. Four matrices of an fp8 cache are 16
// keys by 32 numbers, or 32 keys by 16.
template <typename Cache, int kDim>
__device__ uint32_t KeyLane(int lane) {
  constexpr int kRowBytes = Layout<Cache, kDim>::kRowBytes;
  return kIsFp8<Cache> ? LaneOffsetRowsFirst(lane, kRowBytes)
                       : LaneOffsetColumnsFirst(lane, kRowBytes);
}
template <typename Cache, int kDim>
__device__ uint32_t ValueLane(int lane) {
  using L = Layout<Cache, kDim>;
  return L::kTileBytes +
         (kIsFp8<Cache> ? lane * L::kRowBytes : LaneOffsetRowsFirst(lane, L::kRowBytes));
}

// `query` and `keys` are this lane's addresses for LoadMatrices.
template <typename T, typename Cache, int kDim>
__device__ void ComputeLogits(uint32_t query, uint32_t keys,
                              float (&logits)[Layout<Cache, kDim>::kRowTiles][kKeys / 8][4]) {
  using L = Layout<Cache, kDim>;
  constexpr int kStep = kIsFp8<Cache> ? 2 : 1;  // a matrix of fp8 has the keys of two k
#pragma unroll
  for (int k = 0; k < kDim / 16; k += kStep) {
    uint32_t a[kStep][L::kRowTiles][4];
#pragma unroll
    for (int i = 0; i < kStep; ++i) {
      if (k + i >= kDim / 16) continue;
#pragma unroll
      for (int m = 0; m < L::kRowTiles; ++m) {
        LoadMatrices(a[i][m], query + m * 16 * L::kQueryRowBytes + (k + i) * 32);
      }
    }
#pragma unroll
    for (int n = 0; n < kKeys / 16; ++n) {
      uint32_t b[4];
      if constexpr (!kIsFp8<Cache>) {
        LoadMatrices(b, keys + n * 16 * L::kRowBytes + k * 32);
#pragma unroll
        for (int m = 0; m < L::kRowTiles; ++m) {
          Mma<T>(logits[m][2 * n], a[0][m], b[0], b[1]);
          Mma<T>(logits[m][2 * n + 1], a[0][m], b[2], b[3]);
        }
      } else {
        // Keys 0 to 7, 8 to 15; then the same of the next k. What an odd last one has in place of
        // it is not used.
        LoadMatrices(b, keys + n * 16 * L::kRowBytes + k * 16);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (k + i / 2 >= kDim / 16) continue;
          uint32_t low, high;
          WidenFp8(b[i], low, high);
#pragma unroll
          for (int m = 0; m < L::kRowTiles; ++m) {
            Mma<__half>(logits[m][2 * n + i % 2], a[i / 2][m], low, high);
          }
        }
      }
    }
  }
}

// `values` is this lane's address for LoadMatricesTransposed.
template <typename T, typename Cache, int kDim>
__device__ void AddValues(uint32_t values,
                          const float (&weights)[Layout<Cache, kDim>::kRowTiles][kKeys / 8][4],
                          WarpState<Cache, kDim>& state) {
  using L = Layout<Cache, kDim>;
  constexpr int kStep = kIsFp8<Cache> ? 2 : 1;  // four matrices of fp8 have 32 keys
#pragma unroll
  for (int k = 0; k < kKeys / 16; k += kStep) {
    uint32_t a[kStep][L::kRowTiles][4];
#pragma unroll
    for (int i = 0; i < kStep; ++i) {
#pragma unroll
      for (int m = 0; m < L::kRowTiles; ++m) {
        PackWeights<ProductType<T, Cache>, kKeys>(weights[m], k + i, a[i][m]);
      }
    }
#pragma unroll
    for (int n = 0; n < kDim / 16; ++n) {
      uint32_t b[4];
      if constexpr (!kIsFp8<Cache>) {
        LoadMatricesTransposed(b, values + k * 16 * L::kRowBytes + n * 32);
#pragma unroll
        for (int m = 0; m < L::kRowTiles; ++m) {
          Mma<T>(state.acc[m][2 * n], a[0][m], b[0], b[1]);
          Mma<T>(state.acc[m][2 * n + 1], a[0][m], b[2], b[3]);
        }
      } else {  // even columns, then odd ones
        LoadMatricesTransposed(b, values + k * 16 * L::kRowBytes + n * 16);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          uint32_t even[2], odd[2];
          WidenFp8Pairs(b[2 * i], even[0], odd[0]);
          WidenFp8Pairs(b[2 * i + 1], even[1], odd[1]);
#pragma unroll
          for (int m = 0; m < L::kRowTiles; ++m) {
            Mma<__half>(state.acc[m][2 * n], a[i][m], even[0], even[1]);
            Mma<__half>(state.acc[m][2 * n + 1], a[i][m], odd[0], odd[1]);
          }
        }
      }
    }
  }
}

// A lane's values of one row, divided by its sum, to the row in shared memory.
template <typename T, typename Cache, int kDim>
__device__ void StageRow(const float (&acc)[kDim / 8][4], int h, float inverse, unsigned char* to) {
  const int lane = threadIdx.x % 32;
  if constexpr (!kIsFp8<Cache>) {
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      *reinterpret_cast<uint32_t*>(to + lane % 4 * 4 + n * 16) =
          Pack<T>(acc[n][2 * h] * inverse, acc[n][2 * h + 1] * inverse);
    }
  } else {
#pragma unroll
    for (int n = 0; n < kDim / 8; n += 2) {
      *reinterpret_cast<uint2*>(to + lane % 4 * 8 + n * 16) =
          make_uint2(Pack<T>(acc[n][2 * h] * inverse, acc[n + 1][2 * h] * inverse),
                     Pack<T>(acc[n][2 * h + 1] * inverse, acc[n + 1][2 * h + 1] * inverse));
    }
  }
}

// The warp's rows through its own rows of Q's memory to `out`.
template <typename T, typename Cache, int kDim>
__device__ void StoreRows(const PrefillParams& p, const RowTile& tile, unsigned char* query_memory,
                          const WarpState<Cache, kDim>& state) {
  using L = Layout<Cache, kDim>;
  constexpr int kChunks = kDim / 8;
  const int lane = threadIdx.x % 32;
  const int first_row = threadIdx.x / 32 * L::kWarpRows;
  __syncwarp();  // other lanes have read the warp's rows of Q
#pragma unroll
  for (int m = 0; m < L::kRowTiles; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float inverse = InverseSum(state.rows[m].sum[h]) * p.kv.value_scale;
      StageRow<T, Cache, kDim>(
          state.acc[m], h, inverse,
          query_memory + (first_row + m * 16 + h * 8 + lane / 4) * L::kQueryRowBytes);
    }
  }
  __syncwarp();
  T* const out = static_cast<T*>(p.rows.out);
  for (int i = lane; i < L::kWarpRows * kChunks; i += 32) {
    const int row = first_row + i / kChunks;
    const int chunk = i % kChunks;
    if (row >= tile.num_rows || chunk * 8 >= p.kv.head_dim) continue;
    *reinterpret_cast<uint4*>(out + RowOffset(p, tile, row, p.rows.out_stride) + chunk * 8) =
        *reinterpret_cast<const uint4*>(query_memory + row * L::kQueryRowBytes + chunk * 16);
  }
}

template <typename T, typename Cache, int kDim>
__device__ void AttendRowTile(const PrefillParams& p, const RowTile& tile, int32_t kv_head,
                              unsigned char* memory, int32_t (*cache_rows)[kKeys]) {
  using L = Layout<Cache, kDim>;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int32_t* const table = TableOf(p, tile);
  const KeyRange keys = KeysOf<kKeys>(p, tile);
  const uint32_t query = SharedAddress(memory);
  const uint32_t stages = query + L::kQueryBytes;

  StartQueryCopies<T, Cache, kDim>(p, tile, query);
  if (threadIdx.x < kKeys)
    cache_rows[0][threadIdx.x] = CacheRow<kKeys>(p, keys, table, kv_head, 0, threadIdx.x);
  int32_t next_row = CacheRow<kKeys>(p, keys, table, kv_head, 1, threadIdx.x);
  __syncthreads();
  StartKeyCopies<Cache, kDim>(p.kv, cache_rows[0], stages);  // one group with Q

  WarpState<Cache, kDim> state;
#pragma unroll
  for (int m = 0; m < L::kRowTiles; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      // Rows beyond the tile's (zero queries, not stored) see what its last one sees.
      const int32_t row = min(warp * L::kWarpRows + m * 16 + h * 8 + lane / 4, tile.num_rows - 1);
      state.rows[m].position[h] = tile.Position(tile.first_row + row);
    }
  }
  const uint32_t warp_query = query + warp * L::kWarpRows * L::kQueryRowBytes +
                              LaneOffsetRowsFirst(lane, L::kQueryRowBytes);
  for (int32_t i = 0; i < keys.num_tiles; ++i) {
    if (threadIdx.x < kKeys) cache_rows[(i + 1) % 2][threadIdx.x] = next_row;
    __syncthreads();  // also: all warps are done with tile i - 1, whose stage is filled next
    if (i + 1 < keys.num_tiles) {
      StartKeyCopies<Cache, kDim>(p.kv, cache_rows[(i + 1) % 2],
                                  stages + (i + 1) % 2 * 2 * L::kTileBytes);
      next_row = CacheRow<kKeys>(p, keys, table, kv_head, i + 2, threadIdx.x);
      WaitForCopies<1>();
    } else {
      WaitForCopies<0>();
    }
    __syncthreads();
    const uint32_t stage = stages + i % 2 * 2 * L::kTileBytes;
    if constexpr (kIsFp8<Cache>) {
      if (i == 0) PrepareQuery<T, Cache, kDim>(memory, state);
    }
    float logits[L::kRowTiles][kKeys / 8][4] = {};
    ComputeLogits<T, Cache, kDim>(warp_query, stage + KeyLane<Cache, kDim>(lane), logits);
    const int32_t first_key = keys.first_tile + i * kKeys;
    const bool masked = NeedsMask<kKeys>(p, tile, 0, tile.num_rows - 1, first_key);
#pragma unroll
    for (int m = 0; m < L::kRowTiles; ++m) {
      if constexpr (kIsFp8<Cache> && !std::is_same_v<T, __half>) {
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
          for (int j = 0; j < 4; ++j) logits[m][n][j] *= state.unscale[m][j / 2];
        }
      }
      Softmax<kKeys>(p, first_key, masked, logits[m], state.rows[m]);
      if (!state.rows[m].Shrinks()) continue;
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) {
#pragma unroll
        for (int j = 0; j < 4; ++j) state.acc[m][n][j] *= state.rows[m].shrink[j / 2];
      }
    }
    AddValues<T, Cache, kDim>(stage + ValueLane<Cache, kDim>(lane), logits, state);
  }
  StoreRows<T, Cache, kDim>(p, tile, memory, state);
}

// Grid: row tiles, the last ones (which see most) first; KV heads.
template <typename T, typename Cache, int kDim>
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
  const RowTile tile = FindRowTile<Layout<Cache, kDim>::kRows>(
      p, static_cast<int32_t>(gridDim.x - 1 - blockIdx.x), kv_head);
  if (tile.request < 0) return;
  AttendRowTile<T, Cache, kDim>(p, tile, kv_head, memory, cache_rows);
}

// ---- Host ---------------------------------------------------------------------------------------

}  // namespace

absl::Status PreparePrefill(AttentionTypes types, int64_t head_dim) {
  return WithTypes(types, head_dim, [](auto type, auto cache, auto dim) -> absl::Status {
    constexpr int kDim = decltype(dim)::value;
    LOCKSTEP_CUDA(cudaFuncSetAttribute(PrefillKernel<decltype(type), decltype(cache), kDim>,
                                       cudaFuncAttributeMaxDynamicSharedMemorySize,
                                       Layout<decltype(cache), kDim>::kBlockBytes));
    return absl::OkStatus();
  });
}

absl::Status LaunchPrefill(const PrefillParams& params, AttentionTypes types, bool programmatic,
                           CudaStream stream) {
  return WithTypes(types, params.kv.head_dim, [&](auto type, auto cache, auto dim) -> absl::Status {
    constexpr int kDim = decltype(dim)::value;
    constexpr int kRows = Layout<decltype(cache), kDim>::kRows;
    const int64_t tiles =
        int64_t{params.rows.num_tokens} * params.largest_group / kRows + params.num_requests;
    const dim3 grid(static_cast<unsigned>(tiles), static_cast<unsigned>(params.kv.num_kv_heads));
    return LaunchKernel(PrefillKernel<decltype(type), decltype(cache), kDim>, grid, kThreads,
                        Layout<decltype(cache), kDim>::kBlockBytes, params, programmatic, stream,
                        "launch of prefill attention");
  });
}

}  // namespace lockstep
