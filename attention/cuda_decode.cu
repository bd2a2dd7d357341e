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
#include "attention/cuda_decode.cuh"
#include "attention/cuda_launch.cuh"
#include "attention/cuda_merge.cuh"

namespace lockstep {
namespace decode {
namespace {

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
template <typename T, typename Cache, int kDim>
__device__ void StartCopies(const DecodeParams& p, Memory<Cache, kDim>& memory, int stage,
                            const int32_t* cache_rows) {
  using L = Layout<Cache, kDim>;
  constexpr int kCopies = kKeys * L::kPieces;
  const StageInfo& info = memory.info[stage];
  if (info.end_of_work == 0) {
    const uint32_t to = SharedAddress(memory.stages[stage]);
#pragma unroll
    for (int j = 0; j < (kCopies + kThreads - 1) / kThreads; ++j) {
      const unsigned i = j * kThreads + threadIdx.x;
      if (kCopies % kThreads != 0 && i >= kCopies) break;
      const int row = static_cast<int>(i / L::kPieces);
      const int piece = static_cast<int>(i % L::kPieces);
      const int32_t from_row = cache_rows[row];
      const bool valid = from_row >= 0 && piece * L::kPiece < p.kv.head_dim;
      const int64_t from = valid ? int64_t{from_row} * p.kv.head_dim + piece * L::kPiece : 0;
      const uint32_t row_to = to + row * L::kRowBytes + L::Chunk(row, piece);
      CopyAsync16(row_to, static_cast<const Cache*>(p.kv.keys) + from, valid);
      CopyAsync16(row_to + L::kTileBytes, static_cast<const Cache*>(p.kv.values) + from, valid);
    }
    if (info.is_first != 0) {
      constexpr int kChunks = kDim / 8;
      const T* const query = static_cast<const T*>(p.rows.query) + info.row * p.rows.query_stride +
                             int64_t{info.first_head} * p.kv.head_dim;
#pragma unroll
      for (int i = threadIdx.x; i < kDecodeHeadTile * kChunks; i += kThreads) {
        const int row = i / kChunks;
        const int chunk = i % kChunks;
        const bool valid = row < info.num_heads && chunk * 8 < p.kv.head_dim;
        const uint32_t in_row = kIsFp8<Cache> ? chunk * 16 : L::Chunk(row, chunk);
        CopyAsync16(to + 2 * L::kTileBytes + row * L::kQueryRowBytes + in_row,
                    query + (valid ? row * p.kv.head_dim + chunk * 8 : 0), valid);
      }
    }
  }
  CommitCopies();
}

// An item is done: the output where it is all of its request, else a partial result.
template <typename T, typename Cache, int kDim>
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
    const float scale = !whole ? 1.0f : info.end > info.begin ? p.kv.value_scale / sum : 0.0f;
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
      const float(&acc)[2][4] = state.acc[i / 2];
      const int first = (warp + i / 2 * kWarps) * 16;
      const int column =
          first + (kIsFp8<Cache> ? lane % 4 * 4 + i % 2 * 2 : i % 2 * 8 + lane % 4 * 2);
      if (column >= p.kv.head_dim) continue;
      const float x = scale * (kIsFp8<Cache> ? acc[0][2 * h + i % 2] : acc[i % 2][2 * h]);
      const float y = scale * (kIsFp8<Cache> ? acc[1][2 * h + i % 2] : acc[i % 2][2 * h + 1]);
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

template <typename T, typename Cache, int kDim>
__device__ void AttendTile(const DecodeParams& p, const StageInfo& info, int stage,
                           Memory<Cache, kDim>& memory, WarpState<kDim>& state) {
  const uint32_t tile = SharedAddress(memory.stages[stage]);
  float* const logits = memory.logits;
  if (info.is_first != 0) {
    state.Reset();
    LoadQuery<T, Cache, kDim>(tile, memory.stages[stage], state);
  }
  ComputeLogits<T, Cache, kDim>(p.scale, info, tile, state, logits);
  __syncthreads();
  using Product = ProductType<T, Cache>;
  const float factor = p.scale.cap_output != 0 ? 1.0f : p.scale.factor;
  uint32_t weights[kKeys / 16][4] = {};
  float shrink[2] = {1, 1};
  shrink[0] = SoftmaxRow<Product, kDim>(factor, logits, 0, weights, state);
  if (info.num_heads > 8) shrink[1] = SoftmaxRow<Product, kDim>(factor, logits, 1, weights, state);
  AddValues<T, Cache, kDim>(tile, weights, shrink, state);
  if (info.is_last == 0) return;
  StoreItem<T, Cache, kDim>(p, info, state);
  if (info.num_splits > 1) MergeBehindLast<T>(p, info, &memory.parts_before);
}

// Registers for as many blocks as shared memory holds, or three.
template <int kDim>
constexpr int kBlocksAtOnce = kDim <= 64    ? 3
                              : kDim <= 128 ? 2
                                            : 1;

template <typename T, typename Cache, int kDim>
__global__ void __launch_bounds__(kThreads, kBlocksAtOnce<kDim>)
    DecodeKernel(const __grid_constant__ DecodeParams p) {
  constexpr int kStages = Layout<Cache, kDim>::kStages;
  extern __shared__ __align__(128) unsigned char dynamic_memory[];
  auto& memory = *reinterpret_cast<Memory<Cache, kDim>*>(dynamic_memory);
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
  for (int i = 0; i < kStages - 1; ++i)
    StartCopies<T, Cache, kDim>(p, memory, i, memory.cache_rows[i]);
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
    StartCopies<T, Cache, kDim>(p, memory, free_stage, memory.cache_rows[0]);
    if (threadIdx.x < kKeys) {
      tiles.Advance();
      next_row = tiles.CacheRow();
      next_info = tiles.Info();
    }
    AttendTile<T, Cache, kDim>(p, info, stage, memory, state);
  }
}

// ---- Host ---------------------------------------------------------------------------------------

}  // namespace
}  // namespace decode

absl::StatusOr<int64_t> PrepareDecode(AttentionTypes types, int64_t head_dim) {
  return WithTypes(types, head_dim, [](auto type, auto cache, auto dim) -> absl::StatusOr<int64_t> {
    constexpr int kDim = decltype(dim)::value;
    constexpr int kBytes = sizeof(decode::Memory<decltype(cache), kDim>);
    const auto kernel = decode::DecodeKernel<decltype(type), decltype(cache), kDim>;
    LOCKSTEP_CUDA(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
    int device = 0;
    int multiprocessors = 0;
    int blocks = 0;
    LOCKSTEP_CUDA(cudaGetDevice(&device));
    LOCKSTEP_CUDA(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
    LOCKSTEP_CUDA(
        cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, decode::kThreads, kBytes));
    if (blocks < 1) {
      return absl::FailedPreconditionError(absl::StrFormat(
          "the decode attention kernel for head_dim %d needs %d bytes of shared memory: more than "
          "this device has",
          kDim, kBytes));
    }
    return int64_t{multiprocessors} * blocks;
  });
}

absl::Status LaunchDecode(const DecodeParams& params, AttentionTypes types, int64_t num_blocks,
                          bool programmatic, CudaStream stream) {
  return WithTypes(types, params.kv.head_dim, [&](auto type, auto cache, auto dim) -> absl::Status {
    constexpr int kDim = decltype(dim)::value;
    return LaunchKernel(decode::DecodeKernel<decltype(type), decltype(cache), kDim>,
                        dim3(static_cast<unsigned>(num_blocks)), decode::kThreads,
                        sizeof(decode::Memory<decltype(cache), kDim>), params, programmatic, stream,
                        "launch of decode attention");
  });
}

}  // namespace lockstep
