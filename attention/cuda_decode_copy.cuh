// The warp of a decode block that has the copy engine bring keys, values and queries into the ring.
// See cuda_decode.cu for who does what.
#pragma once

#include "attention/cuda_decode.cuh"
#include "runtime/core/cuda_tensor_map.h"

namespace lockstep {
namespace decode {

struct Params {
  CUtensorMap keys;
  CUtensorMap values;
  DecodeParams decode;
  int32_t box_rows;      // of a page, and so of a page's 16 rows
  int32_t boxes_of_row;  // 1: a box has all panels of its rows
};

// kKeys boxes' worth of an item's keys: `box_rows` tiles.
struct Window {
  DecodeItem item;
  DecodeHeadTile heads;
  int32_t first_key;  // of tile 0 of the item
  int32_t tile;       // the window's first
  int32_t item_tiles;
  int32_t rows[kKeys / 32];  // cache rows of boxes `lane`, `lane` + 32, ...; not of invisible ones
};

// The block's items, window by window.
class WindowSequence {
 public:
  __device__ explicit WindowSequence(const Params& p)
      : p_(p.decode),
        box_rows_(p.box_rows),
        items_(reinterpret_cast<const DecodeItem*>(p.decode.plan + 1)),
        work_(static_cast<int32_t>(blockIdx.x)),
        // Read together with the header: there is room for an item of each block.
        next_(items_[work_ / p_.num_head_tiles]),
        total_(p.decode.plan->num_items * p_.num_head_tiles) {
    StartItem();
  }

  // False at the end of the work. Rows are on their way.
  __device__ bool Next(Window& window) {
    if (work_ >= total_) return false;
    window = current_;
    const int32_t begin = window.first_key + window.tile * kKeys;
#pragma unroll
    for (int i = 0; i < kKeys / 32; ++i) {
      const int32_t key = begin + (i * 32 + static_cast<int32_t>(threadIdx.x) % 32) * box_rows_;
      window.rows[i] = 0;
      if (key + box_rows_ > window.item.key_begin && key < window.item.key_end) {
        window.rows[i] =
            RowIndex(p_.kv, p_.kv.block_tables + window.item.table_row * p_.kv.max_blocks, key,
                     window.heads.kv_head);
      }
    }
    current_.tile += box_rows_;
    if (current_.tile >= current_.item_tiles) {
      work_ += static_cast<int32_t>(gridDim.x);
      StartItem();
    }
    return true;
  }

 private:
  // `next_` becomes the item; the one after it is on its way.
  __device__ void StartItem() {
    if (work_ >= total_) return;
    current_.item = next_;
    current_.heads = p_.head_tiles[work_ % p_.num_head_tiles];
    current_.first_key = next_.key_begin / kFirstKeyMultiple * kFirstKeyMultiple;
    current_.tile = 0;
    // A padding request has no keys and one tile, of which nothing is visible.
    current_.item_tiles = ::max(1, (next_.key_end - current_.first_key + kKeys - 1) / kKeys);
    const int32_t next_work = work_ + static_cast<int32_t>(gridDim.x);
    if (next_work < total_) next_ = items_[next_work / p_.num_head_tiles];
  }

  const DecodeParams& p_;
  int32_t box_rows_;
  const DecodeItem* items_;
  int32_t work_;
  DecodeItem next_;
  int32_t total_;
  Window current_ = {};
};

// A place in the ring.
template <int kStages>
struct Place {
  int stage = 0;
  int parity = 0;
  __device__ void Advance() {
    if (++stage < kStages) return;
    stage = 0;
    parity ^= 1;
  }
};

// Where among its item's parts a tile is.
struct PartPlace {
  int32_t index;
  bool ends_here;

  __device__ PartPlace(const DecodeItem& item, int32_t tile) {
    const int32_t long_tiles = item.long_parts * (item.part_tiles + 1);
    const bool is_long = tile < long_tiles;
    const int32_t tiles = is_long ? item.part_tiles + 1 : item.part_tiles;
    const int32_t place = is_long ? tile : tile - long_tiles;
    index = place / tiles + (is_long ? 0 : item.long_parts);
    ends_here = place % tiles == tiles - 1;
  }
};

__device__ inline StageInfo TileInfo(const Window& window, int32_t tile) {
  const DecodeItem& item = window.item;
  const int32_t first = window.first_key + tile * kKeys;
  const PartPlace part(item, tile);
  const bool ends_item = tile + 1 == window.item_tiles;
  return {.begin = item.key_begin - first,
          .end = item.key_end - first,
          .is_first = tile == 0 ? 1 : 0,
          .is_last = ends_item        ? kLastOfItem
                     : part.ends_here ? kLastOfPart
                                      : 0,
          .row = item.row,
          .first_head = window.heads.first_head,
          .num_heads = window.heads.num_heads,
          .request = item.request,
          .split = item.first_split + part.index,
          .num_splits = item.num_splits,
          .num_runs = item.num_runs};
}

// A tile of the window, and with an item's first one its queries, to a stage that is empty.
template <typename T, typename Cache, int kDim, int kGroups>
__device__ void CopyTile(const Params& p, Memory<Cache, kDim, kGroups>& memory, int stage,
                         const Window& window, int32_t tile, uint64_t policy) {
  using L = Layout<Cache, kDim, kGroups>;
  const bool is_leader = threadIdx.x % 32 == 0;
  const StageInfo info = TileInfo(window, tile);
  // Boxes of which something is visible.
  const int first_box = ::max(info.begin, 0) / p.box_rows;
  const int end_box = (::min(info.end, kKeys) + p.box_rows - 1) / p.box_rows;
  const int num_boxes = info.begin < info.end ? end_box - first_box : 0;
  uint64_t* const barrier = &memory.full[stage];
  const uint32_t to = SharedAddress(memory.stages[stage]);
  const uint32_t query_bytes =
      info.is_first != 0 ? static_cast<uint32_t>(info.num_heads * p.decode.kv.head_dim * 2) : 0;
  if (is_leader) {
    memory.info[stage] = info;
    ArriveExpecting(barrier, query_bytes + static_cast<uint32_t>(num_boxes * p.box_rows) * 2 *
                                               L::kPanels * kPanelBytes);
    if (query_bytes > 0) {
      const T* const query = static_cast<const T*>(p.decode.rows.query) +
                             info.row * p.decode.rows.query_stride +
                             int64_t{info.first_head} * p.decode.kv.head_dim;
      CopyBytes(to + 2 * L::kTileBytes, query, query_bytes, barrier);
    }
  }
  const int boxes_before = (tile - window.tile) * (kKeys / p.box_rows);
  for (int i = first_box; i < first_box + num_boxes; ++i) {
    const int box = boxes_before + i;
    int32_t row = 0;
#pragma unroll
    for (int j = 0; j < kKeys / 32; ++j) {
      const int32_t candidate = __shfl_sync(kFullWarp, window.rows[j], box % 32);
      if (box / 32 == j) row = candidate;
    }
    if (!is_leader) continue;
    const int key = i * p.box_rows;
    const uint32_t box_to = to + key / kWarpKeys * L::kSubtileBytes + key % kWarpKeys * kPanelBytes;
    if (p.boxes_of_row == 1) {
      CopyBox(box_to, &p.keys, 0, row, 0, barrier, policy);
      CopyBox(box_to + L::kTileBytes, &p.values, 0, row, 0, barrier, policy);
    } else {
#pragma unroll
      for (int panel = 0; panel < L::kPanels; ++panel) {
        constexpr int kColumns = kPanelBytes / sizeof(Cache);
        const uint32_t panel_to = box_to + panel * L::kBoxPanelBytes;
        CopyBox(panel_to, &p.keys, panel * kColumns, row, barrier, policy);
        CopyBox(panel_to + L::kTileBytes, &p.values, panel * kColumns, row, barrier, policy);
      }
    }
  }
}

template <typename T, typename Cache, int kDim, int kGroups>
__device__ void CopyAll(const Params& p, Memory<Cache, kDim, kGroups>& memory) {
  const uint64_t policy = EvictFirstPolicy();  // read once a step
  WindowSequence windows(p);
  Place<Layout<Cache, kDim, kGroups>::kStages> place;
  Window next;
  bool more = windows.Next(next);
  while (more) {
    const Window window = next;
    more = windows.Next(next);
    const int32_t end = ::min(window.item_tiles, window.tile + p.box_rows);
    for (int32_t tile = window.tile; tile < end; ++tile) {
      Wait(&memory.empty[place.stage], place.parity ^ 1);
      CopyTile<T>(p, memory, place.stage, window, tile, policy);
      place.Advance();
    }
  }
  if (threadIdx.x % 32 != 0) return;
  Wait(&memory.empty[place.stage], place.parity ^ 1);
  memory.info[place.stage] = {.is_last = kEndOfWork};
  Arrive(&memory.full[place.stage]);
}

}  // namespace decode
}  // namespace lockstep
