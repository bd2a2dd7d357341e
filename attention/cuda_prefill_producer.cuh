// Prefill by warpgroup products: what its warps share, and those that bring work, keys, values and
// queries. The consumers and how all work together: cuda_prefill_wgmma.cu.
#pragma once

#include "attention/cuda_device_code.cuh"
#include "attention/cuda_page_copy.cuh"
#include "attention/cuda_prefill.cuh"
#include "runtime/core/cuda_wgmma.cuh"

namespace lockstep::prefill_wgmma {

struct PrefillWgmmaParams {
  PrefillParams prefill;
  PageMaps maps;
  int32_t box_rows;  // of a copy
  int32_t box_panels;
  int32_t num_row_tiles;   // of each KV head
  uint32_t* work_counter;  // 0 between launches
};

inline constexpr int kGroupThreads = 128;
inline constexpr int kConsumers = 2;
inline constexpr int kThreads = kGroupThreads * (1 + kConsumers);
inline constexpr int kGroupRows = 64;
inline constexpr int kRows = kGroupRows * kConsumers;
inline constexpr int kQueryWarps = 3;
// At least 3: a consumer's last row tile, its present one, the next.
inline constexpr int kWorkStages = 4;
// 65536 registers: (128 * 40 + 256 * 232) = 64512.
inline constexpr int kProducerRegisters = 40;
inline constexpr int kConsumerRegisters = 232;
// Named barriers, of which 0 is __syncthreads: from here up of each consumer, and that its turn has
// come.
inline constexpr int kGroupBarrier = 1;
inline constexpr int kTurnBarrier = kGroupBarrier + kConsumers;

// A tile of keys, and how it lies in shared memory: in groups of 8 rows, each with its panels one
// after the other, so that one copy brings a page of D = 64, 128 or 256; or in panels.
template <int kDim>
struct TileLayout {
  // Measured on an H200, of what registers and shared memory hold. D = 128 with 160 keys and the
  // queries in shared memory is as fast for long contexts, and slower for short ones.
  static constexpr int kKeys = kDim == 64 || kDim == 128 ? 128 : kDim < 128 ? 160 : 80;
  static constexpr int kStages = kDim == 64 ? 3 : 2;
  // A consumer's queries are in registers, and the next ones in shared memory meanwhile; or both
  // in shared memory, where there is room.
  static constexpr bool kQueryInRegisters = kDim == 128;
  static constexpr int kQueryStages = kQueryInRegisters || kDim > 128 ? 1 : 2;
  static constexpr int kPanels = (kDim + kPanelColumns - 1) / kPanelColumns;
  static constexpr bool kPanelsTogether = kDim % kPanelColumns == 0;
  static constexpr int kGroupBytes = 8 * kPanelRowBytes * (kPanelsTogether ? kPanels : 1);
  static constexpr int kPanelBytes = kPanelsTogether ? 8 * kPanelRowBytes : kKeys * kPanelRowBytes;
  static constexpr int kBytes = kKeys * kPanels * kPanelRowBytes;
};

// What the warps of a block work on; request -1: the end.
struct Work {
  RowTile tile;
  KeyRange keys;
  int32_t kv_head;
};

// D padded to kDim. A consumer's thread has kDim / 2 registers of weighted values, kKeys / 2 of
// logits, kKeys / 4 of weights and for D = 128 kDim / 4 of queries: 64 + 64 + 32 + 32 for D = 128,
// 128 + 40 + 20 for D = 256. Shared memory, KiB of Q, and of K and V: D = 64 32 and 3 * 2 * 16,
// D = 128 32 and 2 * 2 * 32, D = 256 64 and 2 * 2 * 40.
template <int kDim>
struct Memory {
  using Tile = TileLayout<kDim>;
  static constexpr int kQueryPanelBytes = kGroupRows * kPanelRowBytes;
  static constexpr int kQueryBytes = Tile::kPanels * kQueryPanelBytes;

  unsigned char query[Tile::kQueryStages][kConsumers][kQueryBytes];
  unsigned char keys[Tile::kStages][Tile::kBytes];
  unsigned char values[Tile::kStages][Tile::kBytes];
  // By the copies; by every warp of the consumers.
  uint64_t keys_full[Tile::kStages];
  uint64_t keys_empty[Tile::kStages];
  uint64_t values_full[Tile::kStages];
  uint64_t values_empty[Tile::kStages];
  // By the query warps; by every warp of the consumer.
  uint64_t query_full[Tile::kQueryStages][kConsumers];
  uint64_t query_empty[Tile::kQueryStages][kConsumers];
  // By the producer; by every other warp.
  uint64_t work_full[kWorkStages];
  uint64_t work_empty[kWorkStages];
  Work work[kWorkStages];
};

// Counts along a ring: a place, and the parity of the phase in which it is filled.
template <int kPlaces>
struct Ring {
  uint32_t count = 0;

  __device__ uint32_t Place() const { return count % kPlaces; }
  __device__ int Parity() const { return static_cast<int>(count / kPlaces % 2); }
  __device__ void Advance() { ++count; }
};

template <int kDim>
__device__ void InitBarriers(Memory<kDim>& memory) {
  for (int stage = 0; stage < Memory<kDim>::Tile::kStages; ++stage) {
    InitBarrier(&memory.keys_full[stage], 1);
    InitBarrier(&memory.keys_empty[stage], 4 * kConsumers);
    InitBarrier(&memory.values_full[stage], 1);
    InitBarrier(&memory.values_empty[stage], 4 * kConsumers);
  }
  for (int i = 0; i < Memory<kDim>::Tile::kQueryStages * kConsumers; ++i) {
    InitBarrier(&memory.query_full[0][i], kQueryWarps);
    InitBarrier(&memory.query_empty[0][i], 4);
  }
  for (int i = 0; i < kWorkStages; ++i) {
    InitBarrier(&memory.work_full[i], 1);
    InitBarrier(&memory.work_empty[i], kQueryWarps + 4 * kConsumers);
  }
  PublishBarriers();
}

// Once for the warp, whose lanes have all done what is announced.
__device__ inline void ArriveAsWarp(uint64_t* barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) Arrive(barrier);
}

// ---- Producer -----------------------------------------------------------------------------------

// Numbers of work: row tiles from the last, which sees most, down; KV heads.
template <int kDim>
class WorkFinder {
 public:
  __device__ WorkFinder(const PrefillWgmmaParams& params, Memory<kDim>& memory)
      : params_(params), memory_(memory), number_(static_cast<int32_t>(blockIdx.x)) {}

  // Appends the next entry to the list.
  __device__ void Publish() {
    const Work work = Find();
    Wait(&memory_.work_empty[ring_.Place()], ring_.Parity() ^ 1);
    if (threadIdx.x % 32 == 0) {
      memory_.work[ring_.Place()] = work;
      Arrive(&memory_.work_full[ring_.Place()]);
    }
    __syncwarp();
    ring_.Advance();
  }

 private:
  __device__ Work Find() {
    const PrefillParams& p = params_.prefill;
    const int32_t heads = p.kv.num_kv_heads;
    Work work;
    while (number_ < params_.num_row_tiles * heads) {
      work.kv_head = number_ % heads;
      work.tile = FindRowTile<kRows>(p, params_.num_row_tiles - 1 - number_ / heads, work.kv_head);
      number_ = NextNumber();
      if (work.tile.request < 0) continue;
      work.keys = KeysOf<TileLayout<kDim>::kKeys>(p, work.tile);
      return work;
    }
    work.tile.request = -1;
    return work;
  }

  // Every block asks until it gets one that is beyond the end, so the count of all is known, and
  // whoever gets the last number leaves the counter as it was found.
  __device__ int32_t NextNumber() {
    int32_t next = 0;
    if (threadIdx.x % 32 == 0) {
      const uint32_t taken = atomicAdd(params_.work_counter, 1u);
      next = static_cast<int32_t>(taken + gridDim.x);
      if (next == params_.num_row_tiles * params_.prefill.kv.num_kv_heads - 1 +
                      static_cast<int32_t>(gridDim.x)) {
        *params_.work_counter = 0;
      }
    }
    return __shfl_sync(kFullWarp, next, 0);
  }

  const PrefillWgmmaParams& params_;
  Memory<kDim>& memory_;
  int32_t number_;
  Ring<kWorkStages> ring_;
};

// Copies of one row tile's K and V, by one warp: a lane for each box of rows of a tile of keys.
template <int kDim>
class TileCopier {
  using Tile = TileLayout<kDim>;

 public:
  __device__ TileCopier(const PrefillWgmmaParams& params, const Work& work)
      : params_(params), work_(work), table_(TableOf(params.prefill, work.tile)) {}

  // Row of the cache of this lane's box of tile i; -1 where it has nothing that is there for rows
  // of the tile or for later ones (which would else have to be made zero).
  __device__ int32_t FirstRow(int32_t i) const {
    const int32_t rows = params_.box_rows;
    const int32_t first = static_cast<int32_t>(threadIdx.x) % 32 * rows;
    const int32_t key = work_.keys.first_tile + i * Tile::kKeys + first;
    if (first >= Tile::kKeys || key >= work_.tile.seq_len || key + rows <= work_.keys.begin) {
      return -1;
    }
    return RowIndex(params_.prefill.kv, table_, key, work_.kv_head);
  }

  __device__ void Copy(const PageMap& map, int32_t first_row, unsigned char* to,
                       uint64_t* full) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int boxes = __popc(__ballot_sync(kFullWarp, first_row >= 0));
    const uint32_t box_bytes = params_.box_rows * Tile::kPanels * kPanelRowBytes;
    if (lane == 0) ArriveExpecting(full, boxes * box_bytes);
    __syncwarp();
    if (first_row < 0) return;
    const uint32_t address = SharedAddress(to) + lane * params_.box_rows / 8 * Tile::kGroupBytes;
    for (int panel = 0; panel < Tile::kPanels; panel += params_.box_panels) {
      CopyPageBox(address + panel * Tile::kPanelBytes, map, first_row, panel, full);
    }
  }

 private:
  const PrefillWgmmaParams& params_;
  const Work& work_;
  const int32_t* table_;
};

template <int kDim>
__device__ void Produce(const PrefillWgmmaParams& params, Memory<kDim>& memory) {
  Ring<Memory<kDim>::Tile::kStages> ring;
  WorkFinder<kDim> finder(params, memory);
  finder.Publish();
  for (int entry = 0;; entry = (entry + 1) % kWorkStages) {
    const Work& work = memory.work[entry];
    if (work.tile.request < 0) return;
    const TileCopier<kDim> copier(params, work);
    const int32_t num_tiles = work.keys.num_tiles;
    int32_t next_row = copier.FirstRow(0);
    for (int32_t i = 0; i < num_tiles; ++i) {
      const int32_t row = next_row;
      next_row = copier.FirstRow(i + 1);
      Wait(&memory.keys_empty[ring.Place()], ring.Parity() ^ 1);
      copier.Copy(params.maps.keys, row, memory.keys[ring.Place()],
                  &memory.keys_full[ring.Place()]);
      __syncwarp();
      Wait(&memory.values_empty[ring.Place()], ring.Parity() ^ 1);
      copier.Copy(params.maps.values, row, memory.values[ring.Place()],
                  &memory.values_full[ring.Place()]);
      __syncwarp();
      ring.Advance();
      // While there is something to do for the others.
      if (i == min(1, num_tiles - 1)) finder.Publish();
    }
  }
}

// ---- Queries ------------------------------------------------------------------------------------

// A consumer's rows of Q.
template <typename T, int kDim>
__device__ void LoadQuery(const PrefillParams& p, const RowTile& tile, int group, int thread,
                          unsigned char* query_memory) {
  constexpr int kChunks = kDim / 8;
  const uint32_t to = SharedAddress(query_memory);
  const T* const query = static_cast<const T*>(p.rows.query);
#pragma unroll 4
  for (int i = thread; i < kGroupRows * kChunks; i += 32 * kQueryWarps) {
    const int row = group * kGroupRows + i / kChunks;
    const int chunk = i % kChunks;
    const bool valid = row < tile.num_rows && chunk * 8 < p.kv.head_dim;
    const int64_t from = RowOffset(p, tile, row, p.rows.query_stride) + chunk * 8;
    CopyAsync16(to + PanelOffset(i / kChunks, chunk, Memory<kDim>::kQueryPanelBytes),
                query + (valid ? from : 0), valid);
  }
  CommitCopies();
  WaitForCopies<0>();
  FenceAsyncProxy();
}

template <typename T, int kDim>
__device__ void ProduceQueries(const PrefillParams& p, int thread, Memory<kDim>& memory) {
  Ring<kWorkStages> work_ring;
  Ring<Memory<kDim>::Tile::kQueryStages> ring;
  for (;; ring.Advance(), work_ring.Advance()) {
    Wait(&memory.work_full[work_ring.Place()], work_ring.Parity());
    const RowTile tile = memory.work[work_ring.Place()].tile;
    ArriveAsWarp(&memory.work_empty[work_ring.Place()]);
    if (tile.request < 0) return;
    for (int group = 0; group < kConsumers; ++group) {
      Wait(&memory.query_empty[ring.Place()][group], ring.Parity() ^ 1);
      LoadQuery<T, kDim>(p, tile, group, thread, memory.query[ring.Place()][group]);
      ArriveAsWarp(&memory.query_full[ring.Place()][group]);
    }
  }
}

}  // namespace lockstep::prefill_wgmma
