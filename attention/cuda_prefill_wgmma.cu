// Prefill with Hopper's warpgroup products (wgmma) and copy engine: as cuda_prefill.cu, whose row
// tiles it shares, but for the machinery.
//
// FlashAttention-3 (Shah et al. 2024), over pages. A block of the grid stays on its multiprocessor
// and takes row tiles from a common counter, those that see most first. In it
//   - one warp finds the next row tile and copies tiles of K and V into rings, a page at a time;
//   - three warps copy the next queries;
//   - two warpgroups, the consumers, have 64 packed query rows each, with logits, weights and
//     weighted values in registers. A consumer issues the logits of tile i, then the weighted
//     values of tile i - 1, and computes the softmax of i while the latter run. They take turns
//     at issuing, so that the tensor cores have the one's products while the other computes a
//     softmax.
//
// Across row tiles, too: the weighted values of a row tile's last keys run during the softmax of
// the next one's first.
//
// Cost of 128 keys for 128 rows of D = 128, a multiprocessor's cycles: products 4 * 128^3 / 4096 =
// 2048; exponentials 128 * 128 / 16 = 1024; 64 KiB of K and V from L2, 32 bytes a cycle; shared
// memory 128 bytes a cycle, of which products need 64, as the queries are in registers, and the
// copies 32. Measured on an H200: 2900 for such a tile, and for a row tile 2.2 of them beside its
// own.
//
// Which tiles a row passes over besides its own does not change its bits: such a tile adds exact
// zeros.
#include <algorithm>
#include <numeric>

#include "attention/cuda_launch.cuh"
#include "attention/cuda_prefill_producer.cuh"
#include "attention/cuda_prefill_tile.cuh"

namespace lockstep {
namespace {

using namespace prefill_wgmma;

// ---- Consumers ----------------------------------------------------------------------------------

__device__ inline void AwaitTurn(int group) {
  asm volatile("bar.sync %0, 256;" ::"r"(kTurnBarrier + group) : "memory");
}
__device__ inline void PassTurn(int group) {
  asm volatile("bar.arrive %0, 256;" ::"r"(kTurnBarrier + 1 - group) : "memory");
}

// Of a quad's 4 x 4 words, lane c has column c and gets row c.
__device__ inline void TransposeQuad(uint32_t (&w)[4]) {
  const bool odd = threadIdx.x % 2 != 0;
  const bool high = threadIdx.x % 4 >= 2;
  const auto exchange = [](uint32_t& a, uint32_t& b, bool upper, int mask) {
    const uint32_t got = __shfl_xor_sync(kFullWarp, upper ? a : b, mask);
    (upper ? a : b) = got;
  };
  exchange(w[0], w[1], odd, 1);
  exchange(w[2], w[3], odd, 1);
  exchange(w[0], w[2], high, 2);
  exchange(w[1], w[3], high, 2);
}

// The lane's two rows, divided by their sums, to `out`.
template <typename T, int kDim>
__device__ void StoreRows(const PrefillParams& p, const RowTile& tile, int first_row,
                          const float (&sums)[2], const float (&acc)[kDim / 8][4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float inverse = InverseSum(sums[h]);
    const int row = first_row + h * 8 + lane / 4;
    T* const out = static_cast<T*>(p.rows.out) + RowOffset(p, tile, row, p.rows.out_stride);
    const auto word = [&](int n) {
      return Pack<T>(acc[n][2 * h] * inverse, acc[n][2 * h + 1] * inverse);
    };
#pragma unroll
    for (int n = 0; n + 4 <= kDim / 8; n += 4) {
      uint32_t words[4] = {word(n), word(n + 1), word(n + 2), word(n + 3)};
      TransposeQuad(words);
      const int chunk = n + lane % 4;
      if (row < tile.num_rows && chunk * 8 < p.kv.head_dim) {
        *reinterpret_cast<uint4*>(out + chunk * 8) =
            make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
#pragma unroll
    for (int n = kDim / 32 * 4; n < kDim / 8; ++n) {  // of D = 80
      if (row < tile.num_rows && n * 8 < p.kv.head_dim) {
        *reinterpret_cast<uint32_t*>(out + n * 8 + lane % 4 * 2) = word(n);
      }
    }
  }
}

// A warpgroup's rows of one row tile after the other. It is always a tile of keys behind with the
// weighted values.
template <typename T, int kDim, bool kCapped>
class Consumer {
  using Tile = TileLayout<kDim>;
  static constexpr int kKeys = Tile::kKeys;

 public:
  __device__ Consumer(const PrefillParams& p, int group, Memory<kDim>& memory)
      : p_(p), memory_(memory), group_(group) {}

  __device__ __forceinline__ void Run() {
    if (group_ == 1) PassTurn(group_);  // the first turn is consumer 0's
    for (;; work_ring_.Advance(), query_ring_.Advance()) {
      Wait(&memory_.work_full[work_ring_.Place()], work_ring_.Parity());
      const Work& work = memory_.work[work_ring_.Place()];
      const bool last = work.tile.request < 0;
      const bool has_rows = !last && group_ * kGroupRows < work.tile.num_rows;
      if (pending_ && (!has_rows || !kOverlapsRowTiles)) {
        Wait(&memory_.values_full[values_ring_.Place()], values_ring_.Parity());
        IssueValues<T, kDim>(SharedAddress(memory_.values[values_ring_.Place()]), weights_, acc_);
        WgmmaWait<0>();
        PinRegisters(acc_);
        FinishRows();
        ClearValues();
      }
      if (last) return;
      if (has_rows) {
        Attend(work);
      } else {
        PassOver(work);
      }
    }
  }

 private:
  // Where shared memory has no room for the next queries, they come late.
  static constexpr bool kOverlapsRowTiles = Tile::kQueryStages > 1 || Tile::kQueryInRegisters;

  __device__ __forceinline__ void Attend(const Work& work) {
    const int thread = static_cast<int>(threadIdx.x) % kGroupThreads;
    const int32_t num_tiles = work.keys.num_tiles;
    int32_t first_key = work.keys.first_tile;
    // Keys that all rows see. Rows beyond the tile's (zero queries, not stored) see what its last
    // one sees.
    const auto position = [&work](int32_t row) {
      return work.tile.Position(work.tile.first_row + min(row, work.tile.num_rows - 1));
    };
    const int32_t all_from = LowestVisible(position((group_ + 1) * kGroupRows - 1), p_.window);
    const int32_t all_to = position(group_ * kGroupRows) + 1;
    SoftmaxRows rows;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      rows.position[h] = position(group_ * kGroupRows + thread / 32 * 16 + h * 8 + thread % 32 / 4);
    }
    uint64_t* const query_empty = &memory_.query_empty[query_ring_.Place()][group_];
    Wait(&memory_.query_full[query_ring_.Place()][group_], query_ring_.Parity());
    if constexpr (Tile::kQueryInRegisters) {
      LoadFragments<kDim>(SharedAddress(memory_.query[query_ring_.Place()][group_]), query_);
      ArriveAsWarp(query_empty);
    } else {
      query_ = SharedAddress(memory_.query[query_ring_.Place()][group_]);
    }
    const auto compute_weights = [&] {
      const bool masked = first_key < all_from || first_key + kKeys > all_to;
      ComputeWeights<kKeys, kCapped>(p_, masked, first_key, logits_, rows);
    };
    const auto pack_weights = [&] {
#pragma unroll
      for (int k = 0; k < kKeys / 16; ++k) PackWeights<T, kKeys>(logits_, k, weights_[k]);
    };

    IssueLogits();
    if constexpr (kOverlapsRowTiles) {
      // Of the last row tile's last keys. Without one, what comes of it is thrown away.
      if (pending_) Wait(&memory_.values_full[values_ring_.Place()], values_ring_.Parity());
      IssueValues<T, kDim>(SharedAddress(memory_.values[values_ring_.Place()]), weights_, acc_);
    }
    PassTurn(group_);
    WgmmaWait<kOverlapsRowTiles ? 1 : 0>();
    ReleaseKeys();
    compute_weights();
    // The compiler moves a wait past arithmetic, up to a branch that depends on the latter.
    if (__any_sync(kFullWarp, !Impossible(rows))) {
      WgmmaWait<0>();
      PinRegisters(acc_);
      FinishRows();
    }
    WgmmaWait<0>();
    PinRegisters(acc_);
    PinRegisters(weights_);
    ClearValues();
    pack_weights();
    pending_ = true;
    if (num_tiles > 1) {
      ZeroValues(work, first_key);
      ring_.Advance();
    }
    for (int32_t i = 1; i < num_tiles; ++i) {
      first_key += kKeys;
      IssueLogits();
      Wait(&memory_.values_full[values_ring_.Place()], values_ring_.Parity());
      IssueValues<T, kDim>(SharedAddress(memory_.values[values_ring_.Place()]), weights_, acc_);
      PassTurn(group_);
      WgmmaWait<1>();
      ReleaseKeys();
      compute_weights();
      if (__any_sync(kFullWarp,
                     rows.shrink[0] != 1.0f || rows.shrink[1] != 1.0f || Impossible(rows))) {
        WgmmaWait<0>();
        PinRegisters(acc_);
#pragma unroll
        for (int n = 0; n < kDim / 8; ++n) {
#pragma unroll
          for (int j = 0; j < 4; ++j) acc_[n][j] *= rows.shrink[j / 2];
        }
      }
      WgmmaWait<0>();
      PinRegisters(acc_);
      PinRegisters(weights_);
      ReleaseValues();
      pack_weights();
      if (i < num_tiles - 1) ring_.Advance();
    }
    ZeroValues(work, first_key);
    ring_.Advance();
    if (!Tile::kQueryInRegisters) ArriveAsWarp(query_empty);
    sums_[0] = rows.sum[0];
    sums_[1] = rows.sum[1];
  }

  __device__ __forceinline__ void IssueLogits() {
    Wait(&memory_.keys_full[ring_.Place()], ring_.Parity());
    AwaitTurn(group_);
    prefill_wgmma::IssueLogits<T, kDim>(query_, SharedAddress(memory_.keys[ring_.Place()]),
                                        logits_);
  }

  // The logits are there.
  __device__ __forceinline__ void ReleaseKeys() {
    PinRegisters(logits_);
    ArriveAsWarp(&memory_.keys_empty[ring_.Place()]);
  }

  // Rows of the tile's values, which are to be weighted next, that are not there.
  __device__ __forceinline__ void ZeroValues(const Work& work, int32_t first_key) {
    const int32_t from = work.keys.begin - first_key;
    const int32_t to = work.tile.seq_len - first_key;
    if (from <= 0 && to >= kKeys) return;
    Wait(&memory_.values_full[ring_.Place()], ring_.Parity());
    ZeroValuesOutside<kDim>(from, to, group_, memory_.values[ring_.Place()]);
  }

  __device__ __forceinline__ void ReleaseValues() {
    ArriveAsWarp(&memory_.values_empty[values_ring_.Place()]);
    values_ring_.Advance();
  }

  __device__ __forceinline__ void ReleaseWork() {
    ArriveAsWarp(&memory_.work_empty[stored_ring_.Place()]);
    stored_ring_.Advance();
  }

  // The last row tile, whose weighted values are complete, to `out`.
  __device__ __forceinline__ void FinishRows() {
    if (!pending_) return;
    pending_ = false;
    ReleaseValues();
    const int warp = static_cast<int>(threadIdx.x) % kGroupThreads / 32;
    StoreRows<T, kDim>(p_, memory_.work[stored_ring_.Place()].tile, group_ * kGroupRows + warp * 16,
                       sums_, acc_);
    ReleaseWork();
  }

  __device__ __forceinline__ void ClearValues() {
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
#pragma unroll
      for (int j = 0; j < 4; ++j) acc_[n][j] = 0;
    }
  }

  // A row tile in which the group has no rows.
  __device__ __forceinline__ void PassOver(const Work& work) {
    Wait(&memory_.query_full[query_ring_.Place()][group_], query_ring_.Parity());
    ArriveAsWarp(&memory_.query_empty[query_ring_.Place()][group_]);
    const int32_t num_tiles = work.keys.num_tiles;
    for (int32_t i = 0; i < num_tiles; ++i) {
      Wait(&memory_.keys_full[ring_.Place()], ring_.Parity());
      ArriveAsWarp(&memory_.keys_empty[ring_.Place()]);
      AwaitTurn(group_);
      PassTurn(group_);
      Wait(&memory_.values_full[ring_.Place()], ring_.Parity());
      ReleaseValues();
      ring_.Advance();
    }
    ReleaseWork();
  }

  const PrefillParams& p_;
  Memory<kDim>& memory_;
  const int group_;
  Ring<kWorkStages> work_ring_;
  Ring<kWorkStages> stored_ring_;
  Ring<Tile::kQueryStages> query_ring_;
  Ring<Tile::kStages> ring_;         // of keys
  Ring<Tile::kStages> values_ring_;  // a tile of keys behind, where pending_

  std::conditional_t<Tile::kQueryInRegisters, uint32_t[kDim / 16][4], uint32_t> query_;
  float acc_[kDim / 8][4] = {};
  float logits_[kKeys / 8][4] = {};
  uint32_t weights_[kKeys / 16][4] = {};
  bool pending_ = false;  // weights are of a tile of keys whose values are not yet weighted
  float sums_[2] = {};    // of the last row tile, as in SoftmaxRows
};

template <typename T, int kDim, bool kCapped>
__global__ void __launch_bounds__(kThreads, 1)
    PrefillWgmmaKernel(const __grid_constant__ PrefillWgmmaParams params) {
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using M = Memory<kDim>;
  const PrefillParams& p = params.prefill;
  extern __shared__ __align__(1024) unsigned char dynamic_memory[];
  AllowSuccessor();
  // Groups of 8 rows begin at multiples of 1024 bytes of shared memory; the launch has room for
  // that.
  const uint32_t misaligned = SharedAddress(dynamic_memory) % 1024;
  auto& memory = *reinterpret_cast<M*>(dynamic_memory + (misaligned == 0 ? 0 : 1024 - misaligned));
  if (threadIdx.x == 0) {
    PrefetchTensorMap(&params.maps.keys);
    PrefetchTensorMap(&params.maps.values);
    InitBarriers(memory);
  }
  WaitForPredecessor();
  if (p.zero_padding_rows != 0) {
    ZeroRows<T>(p.rows, p.kv.head_dim, p.query_start_loc[p.num_requests],
                int64_t{blockIdx.x} * kThreads + threadIdx.x, int64_t{gridDim.x} * kThreads);
  }
  __syncthreads();
  const int warp = __shfl_sync(kFullWarp, static_cast<int>(threadIdx.x) / 32, 0);
  if (warp < 4) {
    GiveRegisters<kProducerRegisters>();
    if (warp == 0) {
      Produce<kDim>(params, memory);
    } else {
      ProduceQueries<T, kDim>(p, static_cast<int>(threadIdx.x) - 32, memory);
    }
  } else {
    TakeRegisters<kConsumerRegisters>();
    Consumer<T, kDim, kCapped>(p, warp / 4 - 1, memory).Run();
  }
#endif
}

// ---- Host ---------------------------------------------------------------------------------------

template <int kDim>
constexpr int kSharedBytes = sizeof(Memory<kDim>) + 1024;

}  // namespace

absl::StatusOr<bool> HasWarpgroupProducts() {
#ifdef LOCKSTEP_SM90A
  int device = 0;
  int major = 0;
  int minor = 0;
  LOCKSTEP_CUDA(cudaGetDevice(&device));
  LOCKSTEP_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  LOCKSTEP_CUDA(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
  return major == 9 && minor == 0;
#else
  return false;
#endif
}

absl::StatusOr<int64_t> PreparePrefillWgmma(DType dtype, int64_t head_dim) {
  int device = 0;
  int processors = 0;
  LOCKSTEP_CUDA(cudaGetDevice(&device));
  LOCKSTEP_CUDA(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
  return WithTypes(dtype, head_dim, [&](auto type, auto dim) -> absl::StatusOr<int64_t> {
    constexpr int kDim = decltype(dim)::value;
    for (const auto kernel : {PrefillWgmmaKernel<decltype(type), kDim, false>,
                              PrefillWgmmaKernel<decltype(type), kDim, true>}) {
      LOCKSTEP_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         kSharedBytes<kDim>));
    }
    return processors;  // one each
  });
}

absl::Status LaunchPrefillWgmma(const PrefillParams& prefill, const KvCacheView& cache,
                                uint32_t* work_counter, DType dtype, int64_t num_blocks,
                                bool programmatic, CudaStream stream) {
  return WithTypes(dtype, cache.head_dim, [&](auto type, auto dim) -> absl::Status {
    constexpr int kDim = decltype(dim)::value;
    using Tile = TileLayout<kDim>;
    PrefillWgmmaParams params = {.prefill = prefill,
                                 .maps = {},
                                 .box_rows = 0,
                                 .box_panels = 1,
                                 .num_row_tiles = 0,
                                 .work_counter = work_counter};
    int64_t box_rows = std::gcd(cache.block_size, int64_t{Tile::kKeys});
    if (Tile::kPanelsTogether && PanelsAreWhole(cache)) {
      params.box_panels = Tile::kPanels;
    } else if (Tile::kPanelsTogether && Tile::kPanels > 1) {
      box_rows = 8;  // panels of other rows lie between
    }
    params.box_rows = static_cast<int32_t>(box_rows);
    LOCKSTEP_ASSIGN_OR_RETURN(params.maps, MakePageMaps(cache, box_rows, params.box_panels));
    params.num_row_tiles = static_cast<int32_t>(
        int64_t{prefill.rows.num_tokens} * prefill.largest_group / kRows + prefill.num_requests);
    const int64_t work = int64_t{params.num_row_tiles} * prefill.kv.num_kv_heads;
    const auto grid = static_cast<unsigned>(std::min(num_blocks, work));
    const auto kernel = prefill.scale.cap_output != 0
                            ? PrefillWgmmaKernel<decltype(type), kDim, true>
                            : PrefillWgmmaKernel<decltype(type), kDim, false>;
    return LaunchKernel(kernel, dim3(grid), kThreads, kSharedBytes<kDim>, params, programmatic,
                        stream, "launch of prefill attention");
  });
}

}  // namespace lockstep
