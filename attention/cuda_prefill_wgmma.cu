// Prefill with Hopper's warpgroup products: as cuda_prefill.cu, whose row tiles and softmax it
// shares, but for the machinery.
//
// FlashAttention-3 (Shah et al. 2024): a producer warpgroup copies K and V tiles into rings; two
// consumer warpgroups have 64 packed query rows each, with logits, weights and weighted values in
// registers. A consumer issues the logits of tile i, then the weighted values of tile i - 1, and
// computes the softmax of i while the latter run; and while one consumer computes a softmax, the
// other's products have the tensor cores. Copies are cp.async of 16 bytes, so blocks of any size
// will do.
//
// Which tiles a row passes over besides its own does not change its bits: such a tile adds exact
// zeros.
#include "attention/cuda_launch.cuh"
#include "attention/cuda_prefill.cuh"
#include "attention/cuda_wgmma.cuh"

namespace lockstep {
namespace {

constexpr int kGroupThreads = 128;
constexpr int kConsumers = 2;
constexpr int kThreads = kGroupThreads * (1 + kConsumers);
constexpr int kGroupRows = 64;
constexpr int kRows = kGroupRows * kConsumers;
constexpr int kStages = 2;
// 65536 registers: (128 * 56 + 256 * 224) = 64512.
constexpr int kProducerRegisters = 56;
constexpr int kConsumerRegisters = 224;
enum Half { kKeyHalf, kValueHalf };

// D padded to kDim. A consumer's thread has kDim / 2 registers of weighted values, kKeys / 2 of
// logits and kKeys / 4 of weights: 64 + 64 + 32 for D = 128, 128 + 32 + 16 for D = 256. Shared
// memory: D = 128: Q 32 KiB, K and V 2 * 2 * 32; D = 256: Q 64, K and V 2 * 2 * 32.
template <int kDim>
struct Memory {
  static constexpr int kKeys = kDim <= 128 ? 128 : 64;  // of a tile
  static constexpr int kPanels = (kDim + kPanelColumns - 1) / kPanelColumns;
  static constexpr int kQueryPanelBytes = kRows * kPanelRowBytes;
  static constexpr int kKeyPanelBytes = kKeys * kPanelRowBytes;

  unsigned char query[kPanels * kQueryPanelBytes];
  unsigned char tiles[2][kStages][kPanels * kKeyPanelBytes];  // of K, then of V
  int32_t cache_rows[2][kKeys];
  uint64_t full[2][kStages];   // by every thread of the producer
  uint64_t empty[2][kStages];  // by every thread of the consumers
};

// ---- Producer -----------------------------------------------------------------------------------

template <typename T, int kDim>
__device__ void StartCopies(const PagedKv& kv, const void* from, const int32_t* cache_rows,
                            unsigned char* to) {
  using M = Memory<kDim>;
  constexpr int kChunks = kDim / 8;
  const uint32_t address = SharedAddress(to);
#pragma unroll 8
  for (int i = threadIdx.x; i < M::kKeys * kChunks; i += kGroupThreads) {
    const int row = i / kChunks;
    const int chunk = i % kChunks;
    const int32_t from_row = cache_rows[row];
    const bool valid = from_row >= 0 && chunk * 8 < kv.head_dim;
    const int64_t offset = valid ? int64_t{from_row} * kv.head_dim + chunk * 8 : 0;
    CopyAsync16(address + PanelOffset(row, chunk, M::kKeyPanelBytes),
                static_cast<const T*>(from) + offset, valid);
  }
  CommitCopies();
}

// Groups of copies: K of tile 0, V of tile 0, K of tile 1, ... A group is announced to the
// consumers when the next one has been started, or as soon as there is no room for the next.
template <typename T, int kDim>
__device__ void Produce(const PrefillParams& p, const RowTile& tile, int32_t kv_head,
                        const KeyRange& keys, Memory<kDim>& memory) {
  using M = Memory<kDim>;
  const int thread = static_cast<int>(threadIdx.x);
  const int32_t* const table = TableOf(p, tile);
  int32_t next_row = CacheRow<M::kKeys>(p, keys, table, kv_head, 0, thread);
  int32_t pending = -1;  // group that is not announced
  const auto announce = [&] {
    FenceForProducts();
    Arrive(&memory.full[pending % 2][pending / 2 % kStages]);
  };
  for (int32_t group = 0; group < 2 * keys.num_tiles; ++group) {
    const int32_t i = group / 2;
    const int half = group % 2;
    const int stage = i % kStages;
    int32_t* const cache_rows = memory.cache_rows[i % 2];
    if (half == kKeyHalf) {
      if (thread < M::kKeys) cache_rows[thread] = next_row;
      SyncWarpgroup(1);
      next_row = CacheRow<M::kKeys>(p, keys, table, kv_head, i + 1, thread);
    }
    if (i >= kStages) {
      uint64_t* const empty = &memory.empty[half][stage];
      const int parity = (i / kStages - 1) % 2;
      if (!TryWait(empty, parity)) {
        if (pending >= 0) {
          WaitForCopies<0>();
          announce();
          pending = -1;
        }
        Wait(empty, parity);
      }
    }
    StartCopies<T, kDim>(p.kv, half == kKeyHalf ? p.kv.keys : p.kv.values, cache_rows,
                         memory.tiles[half][stage]);
    if (pending >= 0) {
      WaitForCopies<1>();
      announce();
    }
    pending = group;
  }
  WaitForCopies<0>();
  announce();
}

// ---- Consumers ----------------------------------------------------------------------------------

// This consumer's rows of Q, into their part of shared memory.
template <typename T, int kDim>
__device__ void LoadQuery(const PrefillParams& p, const RowTile& tile, int group, int thread,
                          unsigned char* query_memory) {
  constexpr int kChunks = kDim / 8;
  const uint32_t to = SharedAddress(query_memory);
  const T* const query = static_cast<const T*>(p.rows.query);
  for (int i = thread; i < kGroupRows * kChunks; i += kGroupThreads) {
    const int row = group * kGroupRows + i / kChunks;
    const int chunk = i % kChunks;
    const bool valid = row < tile.num_rows && chunk * 8 < p.kv.head_dim;
    const int64_t from = RowOffset(p, tile, row, p.rows.query_stride) + chunk * 8;
    CopyAsync16(to + PanelOffset(row, chunk, Memory<kDim>::kQueryPanelBytes),
                query + (valid ? from : 0), valid);
  }
  CommitCopies();
  WaitForCopies<0>();
  FenceForProducts();
}

template <typename T, int kDim>
__device__ void IssueLogits(uint32_t query, uint32_t keys,
                            float (&logits)[Memory<kDim>::kKeys / 8][4]) {
  using M = Memory<kDim>;
  PinRegisters(logits);
  WgmmaFence();
#pragma unroll
  for (int k = 0; k < kDim / 16; ++k) {
    const uint32_t column_bytes = k % 4 * 32;
    Wgmma<T, M::kKeys>::Logits(
        logits, PanelDescriptor(query + k / 4 * M::kQueryPanelBytes + column_bytes, 16),
        PanelDescriptor(keys + k / 4 * M::kKeyPanelBytes + column_bytes, 16), k == 0 ? 0 : 1);
  }
  WgmmaCommit();
}

template <typename T, int kDim>
__device__ void IssueValues(uint32_t values, uint32_t (&weights)[Memory<kDim>::kKeys / 16][4],
                            float (&acc)[kDim / 8][4]) {
  using M = Memory<kDim>;
  PinRegisters(acc);
  PinRegisters(weights);
  WgmmaFence();
#pragma unroll
  for (int k = 0; k < M::kKeys / 16; ++k) {
    Wgmma<T, kDim>::Values(acc, weights[k],
                           PanelDescriptor(values + k * 16 * kPanelRowBytes, M::kKeyPanelBytes));
  }
  WgmmaCommit();
}

// The warp's 16 rows, divided by their sums, through their part of Q's memory to `out`.
template <typename T, int kDim>
__device__ void StoreRows(const PrefillParams& p, const RowTile& tile, int first_row,
                          const SoftmaxRows& rows, const float (&acc)[kDim / 8][4],
                          unsigned char* query_memory) {
  constexpr int kPanelBytes = Memory<kDim>::kQueryPanelBytes;
  constexpr int kChunks = kDim / 8;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float inverse = InverseSum(rows, h);
    const int row = first_row + h * 8 + lane / 4;
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      *reinterpret_cast<uint32_t*>(query_memory + PanelOffset(row, n, kPanelBytes) + lane % 4 * 4) =
          Pack<T>(acc[n][2 * h] * inverse, acc[n][2 * h + 1] * inverse);
    }
  }
  __syncwarp();
  T* const out = static_cast<T*>(p.rows.out);
  for (int i = lane; i < 16 * kChunks; i += 32) {
    const int row = first_row + i / kChunks;
    const int chunk = i % kChunks;
    if (row >= tile.num_rows || chunk * 8 >= p.kv.head_dim) continue;
    *reinterpret_cast<uint4*>(out + RowOffset(p, tile, row, p.rows.out_stride) + chunk * 8) =
        *reinterpret_cast<const uint4*>(query_memory + PanelOffset(row, chunk, kPanelBytes));
  }
}

template <typename T, int kDim>
__device__ void Consume(const PrefillParams& p, const RowTile& tile, const KeyRange& keys,
                        int group, Memory<kDim>& memory) {
  using M = Memory<kDim>;
  constexpr int kKeys = M::kKeys;
  const int thread = static_cast<int>(threadIdx.x) % kGroupThreads;
  LoadQuery<T, kDim>(p, tile, group, thread, memory.query);
  SyncWarpgroup(2 + group);
  const uint32_t query =
      SharedAddress(memory.query) + static_cast<uint32_t>(group) * kGroupRows * kPanelRowBytes;
  const int first_row = group * kGroupRows + thread / 32 * 16;
  SoftmaxRows rows;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    // Rows beyond the tile's (zero queries, not stored) see what its last one sees.
    const int32_t row = min(first_row + h * 8 + thread % 32 / 4, tile.num_rows - 1);
    rows.position[h] = tile.Position(tile.first_row + row);
  }
  const int32_t group_last_row = min((group + 1) * kGroupRows, tile.num_rows) - 1;
  const auto softmax = [&](int32_t i, float(&logits)[kKeys / 8][4]) {
    const int32_t first_key = keys.first_tile + i * kKeys;
    const bool masked = NeedsMask<kKeys>(p, tile, group * kGroupRows, group_last_row, first_key);
    Softmax<kKeys>(p, first_key, masked, logits, rows);
  };
  const auto tile_address = [&](Half half, int32_t i) {
    return SharedAddress(memory.tiles[half][i % kStages]);
  };
  const auto wait_full = [&](Half half, int32_t i) {
    Wait(&memory.full[half][i % kStages], i / kStages % 2);
  };

  float acc[kDim / 8][4] = {};
  float logits[kKeys / 8][4];
  uint32_t weights[kKeys / 16][4];
#pragma unroll
  for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
    for (int j = 0; j < 4; ++j) logits[n][j] = 0;
  }
  wait_full(kKeyHalf, 0);
  IssueLogits<T, kDim>(query, tile_address(kKeyHalf, 0), logits);
  WgmmaWait<0>();
  PinRegisters(logits);
  Arrive(&memory.empty[kKeyHalf][0]);
  softmax(0, logits);
#pragma unroll
  for (int k = 0; k < kKeys / 16; ++k) PackWeights<T, kKeys>(logits, k, weights[k]);
  for (int32_t i = 1; i < keys.num_tiles; ++i) {
    wait_full(kKeyHalf, i);
    IssueLogits<T, kDim>(query, tile_address(kKeyHalf, i), logits);
    wait_full(kValueHalf, i - 1);
    IssueValues<T, kDim>(tile_address(kValueHalf, i - 1), weights, acc);
    WgmmaWait<1>();
    PinRegisters(logits);
    Arrive(&memory.empty[kKeyHalf][i % kStages]);
    softmax(i, logits);
    WgmmaWait<0>();
    PinRegisters(acc);
    PinRegisters(weights);
    Arrive(&memory.empty[kValueHalf][(i - 1) % kStages]);
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
#pragma unroll
      for (int j = 0; j < 4; ++j) acc[n][j] *= rows.shrink[j / 2];
    }
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) PackWeights<T, kKeys>(logits, k, weights[k]);
  }
  wait_full(kValueHalf, keys.num_tiles - 1);
  IssueValues<T, kDim>(tile_address(kValueHalf, keys.num_tiles - 1), weights, acc);
  WgmmaWait<0>();
  PinRegisters(acc);
  SyncWarpgroup(2 + group);  // no product of the group reads Q any more
  StoreRows<T, kDim>(p, tile, first_row, rows, acc, memory.query);
}

// Grid: row tiles, the last ones (which see most) first; KV heads.
template <typename T, int kDim>
__global__ void __launch_bounds__(kThreads, 1)
    PrefillWgmmaKernel(const __grid_constant__ PrefillParams p) {
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using M = Memory<kDim>;
  extern __shared__ __align__(1024) unsigned char dynamic_memory[];
  AllowSuccessor();
  WaitForPredecessor();
  if (p.zero_padding_rows != 0) {
    const int64_t block = int64_t{blockIdx.y} * gridDim.x + blockIdx.x;
    ZeroRows<T>(p.rows, p.kv.head_dim, p.query_start_loc[p.num_requests],
                block * kThreads + threadIdx.x, int64_t{gridDim.x} * gridDim.y * kThreads);
  }
  const int32_t kv_head = static_cast<int32_t>(blockIdx.y);
  const RowTile tile =
      FindRowTile<kRows>(p, static_cast<int32_t>(gridDim.x - 1 - blockIdx.x), kv_head, kThreads);
  if (tile.request < 0) return;
  const KeyRange keys = KeysOf<M::kKeys>(p, tile);
  // Panels begin at multiples of 1024 bytes of shared memory; the launch has room for that.
  const uint32_t misaligned = SharedAddress(dynamic_memory) % 1024;
  auto& memory = *reinterpret_cast<M*>(dynamic_memory + (misaligned == 0 ? 0 : 1024 - misaligned));
  const int consumers = tile.num_rows > kGroupRows ? 2 : 1;
  if (threadIdx.x == 0) {
    for (int half = 0; half < 2; ++half) {
      for (int stage = 0; stage < kStages; ++stage) {
        InitBarrier(&memory.full[half][stage], kGroupThreads);
        InitBarrier(&memory.empty[half][stage], consumers * kGroupThreads);
      }
    }
  }
  __syncthreads();
  const int group = static_cast<int>(threadIdx.x) / kGroupThreads - 1;
  if (group < 0) {
    GiveRegisters<kProducerRegisters>();
    Produce<T, kDim>(p, tile, kv_head, keys, memory);
  } else {
    TakeRegisters<kConsumerRegisters>();
    if (group < consumers) Consume<T, kDim>(p, tile, keys, group, memory);
  }
#endif
}

// ---- Host ---------------------------------------------------------------------------------------

template <int kDim>
constexpr int kSharedBytes = sizeof(Memory<kDim>) + 1024;

}  // namespace

absl::StatusOr<bool> PreparePrefillWgmma(DType dtype, int64_t head_dim) {
  int device = 0;
  int major = 0;
  int minor = 0;
  LOCKSTEP_CUDA(cudaGetDevice(&device));
  LOCKSTEP_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  LOCKSTEP_CUDA(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
#ifdef LOCKSTEP_SM90A
  if (major != 9 || minor != 0) return false;
  return WithTypes(dtype, head_dim, [](auto type, auto dim) -> absl::StatusOr<bool> {
    constexpr int kDim = decltype(dim)::value;
    LOCKSTEP_CUDA(cudaFuncSetAttribute(PrefillWgmmaKernel<decltype(type), kDim>,
                                       cudaFuncAttributeMaxDynamicSharedMemorySize,
                                       kSharedBytes<kDim>));
    return true;
  });
#else
  return false;
#endif
}

absl::Status LaunchPrefillWgmma(const PrefillParams& params, DType dtype, bool programmatic,
                                CudaStream stream) {
  return WithTypes(dtype, params.kv.head_dim, [&](auto type, auto dim) -> absl::Status {
    constexpr int kDim = decltype(dim)::value;
    const int64_t tiles =
        int64_t{params.rows.num_tokens} * params.largest_group / kRows + params.num_requests;
    const dim3 grid(static_cast<unsigned>(tiles), static_cast<unsigned>(params.kv.num_kv_heads));
    return LaunchKernel(PrefillWgmmaKernel<decltype(type), kDim>, grid, kThreads,
                        kSharedBytes<kDim>, params, programmatic, stream,
                        "launch of prefill attention");
  });
}

}  // namespace lockstep
