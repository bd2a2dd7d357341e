// Decode: one query row per request over its paged keys and values; memory-bound, so everything is
// arranged for a steady stream of 16-byte copies.
//
// Floor: bytes of the K and V rows read, 2 * Hkv * D * 2 * sum of seq_lens, over memory bandwidth.
//
// A work item is one part of one request's keys (DecodeItem) for one head tile: all query heads of
// a KV head (up to 16), which are the 16 rows of the tensor-core products. A block goes through its
// items' tiles of 64 keys as one sequence: copies into a ring run ahead of the computation, from
// one item into the next. Of a tile, each of the 4 warps computes the logits of 16 keys, which meet
// in shared memory; then each has the softmax by parts of all 64 (Milakov and Gimelshein 2018,
// "Online normalizer calculation for softmax"), four times the same but without another exchange,
// and adds up its own quarter of the columns of the weighted values.
//
// A request of several parts: partial results go to memory, and the block that finishes the last of
// them adds them all (cuda_merge.cuh).
#include "attention/cuda_device_code.cuh"
#include "attention/cuda_launch.cuh"
#include "attention/cuda_merge.cuh"

namespace lockstep {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kKeys = kDecodeKeyTile;
static_assert(kKeys == 16 * kWarps && kKeys <= kThreads);

// D padded to kDim. A stage of the ring: 64 rows of K, 64 of V, 16 of queries. Where a row is a
// multiple of 128 bytes, its 16-byte pieces are permuted by the row's number, else 16 bytes follow
// each row; both put the same columns of 8 rows into different banks. D = 128: 3 stages of 144 *
// 256 bytes and 5 KiB make 112.7 KiB, just half of what a multiprocessor has: two blocks, whose 128
// KiB of copies under way are more than the 34 KiB that 4.5 TB/s and 1 us of latency take.
template <int kDim>
struct Layout {
  static constexpr int kStages = 3;
  static constexpr bool kPermuted = kDim % 64 == 0;
  static constexpr int kRowBytes = kDim * 2 + (kPermuted ? 0 : 16);
  static constexpr int kTileBytes = kKeys * kRowBytes;
  static constexpr int kStageBytes = 2 * kTileBytes + kDecodeHeadTile * kRowBytes;

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

template <int kDim>
struct Memory {
  unsigned char stages[Layout<kDim>::kStages][Layout<kDim>::kStageBytes];
  // Logits of the tile; the key's number is permuted by the row's: see LogitIndex.
  float logits[kDecodeHeadTile * kKeys];
  int32_t cache_rows[Layout<kDim>::kStages - 1][kKeys];  // of tiles to be copied; -1: not visible
  StageInfo info[Layout<kDim>::kStages];
  uint32_t parts_before;  // of a part's request and heads, done when it was
};

// Rows 0 to 3 of a pair of neighbouring keys lie in different banks.
__device__ int LogitIndex(int row, int key) { return row * kKeys + (key ^ (row % 4 * 8)); }

// The block's items, tile by tile; in threads below kKeys.
class TileSequence {
 public:
  __device__ explicit TileSequence(const DecodeParams& p)
      : p_(p),
        items_(reinterpret_cast<const DecodeItem*>(p.plan + 1)),
        work_(static_cast<int32_t>(blockIdx.x)),
        // Read together with the header: there is room for an item of each block.
        next_(items_[work_ / p.num_head_tiles]),
        total_(p.plan->num_items * p.num_head_tiles) {
    StartItem();
  }

  __device__ bool done() const { return work_ >= total_; }

  // Cache row of key threadIdx.x of the tile.
  __device__ int32_t CacheRow() const {
    const int32_t key = first_key_ + tile_ * kKeys + static_cast<int32_t>(threadIdx.x);
    if (done() || key < item_.key_begin || key >= item_.key_end) return -1;
    return RowIndex(p_.kv, p_.kv.block_tables + item_.table_row * p_.kv.max_blocks, key,
                    heads_.kv_head);
  }

  __device__ StageInfo Info() const {
    const int32_t first = first_key_ + tile_ * kKeys;
    return {.end_of_work = done() ? 1 : 0,
            .begin = item_.key_begin - first,
            .end = item_.key_end - first,
            .is_first = tile_ == 0 ? 1 : 0,
            .is_last = tile_ == num_tiles_ - 1 ? 1 : 0,
            .request = item_.request,
            .row = item_.row,
            .split = item_.split,
            .num_splits = item_.num_splits,
            .first_head = heads_.first_head,
            .num_heads = heads_.num_heads};
  }

  __device__ void Advance() {
    if (done() || ++tile_ < num_tiles_) return;
    work_ += static_cast<int32_t>(gridDim.x);
    StartItem();
  }

 private:
  // `next_` becomes the item; the one after it is on its way.
  __device__ void StartItem() {
    if (done()) return;
    item_ = next_;
    heads_ = p_.head_tiles[work_ % p_.num_head_tiles];
    first_key_ = item_.key_begin / kFirstKeyMultiple * kFirstKeyMultiple;
    tile_ = 0;
    // A padding request has no keys and one tile, of which nothing is visible.
    num_tiles_ = ::max(1, (item_.key_end - first_key_ + kKeys - 1) / kKeys);
    const int32_t next_work = work_ + static_cast<int32_t>(gridDim.x);
    if (next_work < total_) next_ = items_[next_work / p_.num_head_tiles];
  }

  const DecodeParams& p_;
  const DecodeItem* items_;
  int32_t work_;
  DecodeItem next_;
  int32_t total_;
  DecodeItem item_ = {};
  DecodeHeadTile heads_ = {};
  int32_t first_key_ = 0;
  int32_t tile_ = 0;
  int32_t num_tiles_ = 0;
};

// Copies of one tile, given its rows and info; queries with an item's first tile. Always one group.
template <typename T, int kDim>
__device__ void StartCopies(const DecodeParams& p, Memory<kDim>& memory, int stage,
                            const int32_t* cache_rows) {
  using L = Layout<kDim>;
  constexpr int kChunks = kDim / 8;
  const StageInfo& info = memory.info[stage];
  if (info.end_of_work == 0) {
    const uint32_t to = SharedAddress(memory.stages[stage]);
#pragma unroll
    for (int j = 0; j < kKeys * kChunks / kThreads; ++j) {
      const int row = (j * kThreads + threadIdx.x) / kChunks;
      const int chunk = (j * kThreads + threadIdx.x) % kChunks;
      const int32_t from_row = cache_rows[row];
      const bool valid = from_row >= 0 && chunk * 8 < p.kv.head_dim;
      const int64_t from = valid ? int64_t{from_row} * p.kv.head_dim + chunk * 8 : 0;
      const uint32_t row_to = to + row * L::kRowBytes + L::Chunk(row, chunk);
      CopyAsync16(row_to, static_cast<const T*>(p.kv.keys) + from, valid);
      CopyAsync16(row_to + L::kTileBytes, static_cast<const T*>(p.kv.values) + from, valid);
    }
    if (info.is_first != 0) {
      const T* const query = static_cast<const T*>(p.rows.query) + info.row * p.rows.query_stride +
                             int64_t{info.first_head} * p.kv.head_dim;
#pragma unroll
      for (int i = threadIdx.x; i < kDecodeHeadTile * kChunks; i += kThreads) {
        const int row = i / kChunks;
        const int chunk = i % kChunks;
        const bool valid = row < info.num_heads && chunk * 8 < p.kv.head_dim;
        CopyAsync16(to + 2 * L::kTileBytes + row * L::kRowBytes + L::Chunk(row, chunk),
                    query + (valid ? row * p.kv.head_dim + chunk * 8 : 0), valid);
      }
    }
  }
  CommitCopies();
}

// What a warp keeps of an item. Rows g and g + 8 of the heads are this lane's; the second half is
// left out where the tile has at most 8 heads.
template <int kDim>
struct WarpState {
  // Pairs of 8 columns; of all D / 16, warp w has w, w + 4, ...
  static constexpr int kPairs = (kDim / 16 + kWarps - 1) / kWarps;

  uint32_t query[kDim / 16][4];
  float acc[kPairs][2][4];
  float max[2];
  float sum[2];  // this lane's keys only

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

template <int kDim>
__device__ void LoadQuery(uint32_t stage, WarpState<kDim>& state) {
  using L = Layout<kDim>;
  const int lane = threadIdx.x % 32;
  const uint32_t row = stage + 2 * L::kTileBytes + lane % 16 * L::kRowBytes;
#pragma unroll
  for (int k = 0; k < kDim / 16; ++k) {
    LoadMatrices(state.query[k], row + L::Chunk(lane % 8, 2 * k + lane / 16));
  }
}

// Logits of the warp's 16 keys, as products or capped, into shared memory. Two chains of products
// for each, over even and odd k.
template <typename T, int kDim>
__device__ void ComputeLogits(const LogitScale& scale, const StageInfo& info, uint32_t stage,
                              const WarpState<kDim>& state, float* logits) {
  using L = Layout<kDim>;
  const int lane = threadIdx.x % 32;
  const int first = threadIdx.x / 32 * 16;
  const uint32_t row = stage + (first + lane / 16 * 8 + lane % 8) * L::kRowBytes;
  float c[2][2][4] = {};
#pragma unroll
  for (int k = 0; k < kDim / 16; ++k) {
    uint32_t b[4];
    LoadMatrices(b, row + L::Chunk(lane % 8, 2 * k + lane / 8 % 2));
    Mma<T>(c[k % 2][0], state.query[k], b[0], b[1]);
    Mma<T>(c[k % 2][1], state.query[k], b[2], b[3]);
  }
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

template <typename T, int kDim>
__device__ void AddValues(uint32_t stage, const uint32_t (&weights)[4][4], const float (&shrink)[2],
                          WarpState<kDim>& state) {
  using L = Layout<kDim>;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const uint32_t row = stage + L::kTileBytes + lane % 16 * L::kRowBytes;
#pragma unroll
  for (int j = 0; j < WarpState<kDim>::kPairs; ++j) {
    const int pair = warp + j * kWarps;
    if (pair >= kDim / 16) continue;
#pragma unroll
    for (int i = 0; i < 8; ++i) state.acc[j][i / 4][i % 4] *= shrink[i % 4 / 2];
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
      uint32_t b[4];
      LoadMatricesTransposed(
          b, row + k * 16 * L::kRowBytes + L::Chunk(lane % 8, 2 * pair + lane / 16));
      Mma<T>(state.acc[j][0], weights[k], b[0], b[1]);
      Mma<T>(state.acc[j][1], weights[k], b[2], b[3]);
    }
  }
}

// An item is done: the output where it is all of its request, else a partial result.
template <typename T, int kDim>
__device__ void StoreItem(const DecodeParams& p, const StageInfo& info,
                          const WarpState<kDim>& state) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const bool capped = p.scale.cap_output != 0;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float sum = state.sum[h];
    sum += __shfl_xor_sync(kFullWarp, sum, 1);
    sum += __shfl_xor_sync(kFullWarp, sum, 2);
    const int row = lane / 4 + h * 8;
    if (row >= info.num_heads) continue;
    const int32_t head = info.first_head + row;
    const bool whole = info.num_splits == 1;
    // Without any key (a padding request) the row is zero.
    const float scale = !whole ? 1.0f : info.end > info.begin ? 1.0f / sum : 0.0f;
    const int64_t partial = PartialRow(p, info.request, head) + info.split;
    if (!whole && warp == 0 && lane % 4 == 0) {
      *reinterpret_cast<float2*>(p.partial_stats + 2 * partial) =
          make_float2(state.max[h] * (capped ? 1.0f : p.scale.factor), sum);
    }
    T* const out =
        static_cast<T*>(p.rows.out) + info.row * p.rows.out_stride + int64_t{head} * p.kv.head_dim;
    float* const values = p.partials + partial * p.kv.head_dim;
#pragma unroll
    for (int i = 0; i < WarpState<kDim>::kPairs * 2; ++i) {
      const int column = (warp + i / 2 * kWarps) * 16 + i % 2 * 8 + lane % 4 * 2;
      if (column >= p.kv.head_dim) continue;
      const float x = state.acc[i / 2][i % 2][2 * h] * scale;
      const float y = state.acc[i / 2][i % 2][2 * h + 1] * scale;
      if (whole) {
        *reinterpret_cast<uint32_t*>(out + column) = Pack<T>(x, y);
      } else {
        *reinterpret_cast<float2*>(values + column) = make_float2(x, y);
      }
    }
  }
}

// A part has been stored by all threads. That which is the last of its request is merged with the
// others.
template <typename T>
__device__ void MergeBehindLast(const DecodeParams& p, const StageInfo& info,
                                uint32_t* parts_before) {
  __syncthreads();
  if (threadIdx.x == 0) {
    uint32_t* const done =
        p.parts_done + int64_t{info.request} * p.rows.num_query_heads + info.first_head;
    *parts_before = CountPart(done, info.num_splits);
  }
  __syncthreads();
  if (*parts_before + 1 != static_cast<uint32_t>(info.num_splits)) return;
  for (int row = threadIdx.x / 32; row < info.num_heads; row += kWarps) {
    MergeHead<T>(p, info.request, info.row, info.first_head + row, info.num_splits);
  }
}

template <typename T, int kDim>
__device__ void AttendTile(const DecodeParams& p, const StageInfo& info, uint32_t stage,
                           Memory<kDim>& memory, WarpState<kDim>& state) {
  float* const logits = memory.logits;
  if (info.is_first != 0) {
    state.Reset();
    LoadQuery<kDim>(stage, state);
  }
  ComputeLogits<T, kDim>(p.scale, info, stage, state, logits);
  __syncthreads();
  const float factor = p.scale.cap_output != 0 ? 1.0f : p.scale.factor;
  uint32_t weights[kKeys / 16][4] = {};
  float shrink[2] = {1, 1};
  shrink[0] = SoftmaxRow<T, kDim>(factor, logits, 0, weights, state);
  if (info.num_heads > 8) shrink[1] = SoftmaxRow<T, kDim>(factor, logits, 1, weights, state);
  AddValues<T, kDim>(stage, weights, shrink, state);
  if (info.is_last == 0) return;
  StoreItem<T, kDim>(p, info, state);
  if (info.num_splits > 1) MergeBehindLast<T>(p, info, &memory.parts_before);
}

template <typename T, int kDim>
__global__ void __launch_bounds__(kThreads) DecodeKernel(const __grid_constant__ DecodeParams p) {
  constexpr int kStages = Layout<kDim>::kStages;
  extern __shared__ __align__(128) unsigned char dynamic_memory[];
  auto& memory = *reinterpret_cast<Memory<kDim>*>(dynamic_memory);
  AllowSuccessor();
  WaitForPredecessor();
  TileSequence tiles(p);
  const auto publish = [&](int stage, int slot, int32_t cache_row, const StageInfo& info) {
    if (threadIdx.x < kKeys) memory.cache_rows[slot][threadIdx.x] = cache_row;
    if (threadIdx.x == 0) memory.info[stage] = info;
  };
  // The first tiles' rows are read together; then there is always one that waits to be published.
  int32_t first_rows[kStages - 1];
  StageInfo first_info[kStages - 1];
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) {
    first_rows[i] = tiles.CacheRow();
    first_info[i] = tiles.Info();
    tiles.Advance();
  }
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) publish(i, i, first_rows[i], first_info[i]);
  int32_t next_row = tiles.CacheRow();
  StageInfo next_info = tiles.Info();
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) StartCopies<T, kDim>(p, memory, i, memory.cache_rows[i]);
  ZeroRows<T>(p.rows, p.kv.head_dim, p.plan->num_rows, int64_t{blockIdx.x} * kThreads + threadIdx.x,
              int64_t{gridDim.x} * kThreads);

  __syncthreads();  // cache_rows have been read

  WarpState<kDim> state;
  state.Reset();
  for (int stage = 0, free_stage = kStages - 1;;
       free_stage = stage, stage = stage + 1 == kStages ? 0 : stage + 1) {
    publish(free_stage, 0, next_row, next_info);
    WaitForCopies<kStages - 2>();
    __syncthreads();  // also: all warps are done with the tile before, in free_stage
    const StageInfo info = memory.info[stage];
    if (info.end_of_work != 0) break;
    StartCopies<T, kDim>(p, memory, free_stage, memory.cache_rows[0]);
    if (threadIdx.x < kKeys) {
      tiles.Advance();
      next_row = tiles.CacheRow();
      next_info = tiles.Info();
    }
    AttendTile<T, kDim>(p, info, SharedAddress(memory.stages[stage]), memory, state);
  }
}

// ---- Host ---------------------------------------------------------------------------------------

}  // namespace

absl::StatusOr<int64_t> PrepareDecode(DType dtype, int64_t head_dim) {
  return WithTypes(dtype, head_dim, [](auto type, auto dim) -> absl::StatusOr<int64_t> {
    constexpr int kDim = decltype(dim)::value;
    constexpr int kBytes = sizeof(Memory<kDim>);
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
    return int64_t{multiprocessors} * blocks;
  });
}

absl::Status LaunchDecode(const DecodeParams& params, DType dtype, int64_t num_blocks,
                          bool programmatic, CudaStream stream) {
  return WithTypes(dtype, params.kv.head_dim, [&](auto type, auto dim) -> absl::Status {
    constexpr int kDim = decltype(dim)::value;
    return LaunchKernel(DecodeKernel<decltype(type), kDim>, dim3(static_cast<unsigned>(num_blocks)),
                        kThreads, sizeof(Memory<kDim>), params, programmatic, stream,
                        "launch of decode attention");
  });
}

}  // namespace lockstep
