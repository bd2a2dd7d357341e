// Decode: one query row per request over its paged keys and values; memory-bound, so everything is
// arranged for a steady stream of copies.
//
// Floor: bytes of the K and V rows read, 2 * Hkv * D * 2 * sum of seq_lens, over memory bandwidth.
//
// A work item is some parts of one request's keys (DecodeItem) for one head tile: all query heads
// of a KV head (up to 16), which are the columns of the tensor-core products. A block goes through
// its items' tiles of 64 keys as one sequence. One warp has the copy engine bring them, a box for
// each page, into a ring: ahead of the computation, from one item into the next. Of a tile, each of
// the other 4 warps has 16 keys for itself: their logits, softmax by parts (Milakov and Gimelshein
// 2018, "Online normalizer calculation for softmax") and weighted values of all columns. So these
// warps wait for copies only, never for each other, up to the end of a part, when their results are
// added up in shared memory.
//
// An item that has all of its row's parts adds them up in registers. Else they go to memory, and
// the block that finishes the row's last item adds them all (cuda_merge.cuh).
#include <algorithm>
#include <numeric>

#include "attention/cuda_decode_copy.cuh"
#include "attention/cuda_launch.cuh"
#include "attention/cuda_merge.cuh"

namespace lockstep {
namespace decode {
namespace {

// ---- The warps that compute ---------------------------------------------------------------------

__device__ inline void SyncConsumers() {
  __syncwarp();
  asm volatile("bar.sync 1, %0;" ::"n"(kConsumers) : "memory");
}

// The results of the warps' own keys lie where these were, 8 heads at a time: kDim floats for each
// head. Rows of lanes g in the same columns are in different banks.
template <typename Cache, int kDim, int kGroups>
struct ResultAddress {
  using L = Layout<Cache, kDim, kGroups>;
  static_assert(8 * kDim * 4 <= 2 * L::kSubtileBytes);
  static __device__ float* At(unsigned char* stage, int warp, int head, int column) {
    const int offset = (head * kDim + (column ^ (head / 2 * 8))) * 4;
    const int in_values = offset / L::kSubtileBytes;
    return reinterpret_cast<float*>(stage + warp * L::kSubtileBytes + in_values * L::kTileBytes +
                                    offset % L::kSubtileBytes);
  }
};

// This warp's results for heads 8 n and up.
template <typename Cache, int kDim, int kGroups>
__device__ void PutResults(unsigned char* stage, int n, const WarpState<kDim, kGroups>& state,
                           float2* stats) {
  using Address = ResultAddress<Cache, kDim, kGroups>;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const int head = lane % 4 * 2 + j;
    float sum = state.sum[n][j];
#pragma unroll
    for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(kFullWarp, sum, step);
    if (lane < 4) stats[n * 8 + head] = make_float2(state.max[n][j], sum);
#pragma unroll
    for (int i = 0; i < kDim / 16; ++i) {
      const int column = i * 16 + lane / 4 * (kIsFp8<Cache> ? 2 : 1);
      *Address::At(stage, warp, head, column) = state.acc[n][i][j];
      *Address::At(stage, warp, head, column + (kIsFp8<Cache> ? 1 : 8)) = state.acc[n][i][2 + j];
    }
  }
}

// What a thread adds up of the parts of an item that has all of its row's: 4 columns of a head, and
// again kConsumers times 4 columns further.
template <int kDim, int kGroups>
struct ItemState {
  static constexpr int kCount = 8 * kDim / 4 / kConsumers;
  static_assert(8 * kDim / 4 % kConsumers == 0);
  PartsSoFar parts[kGroups][kCount];

  __device__ void Reset() {
#pragma unroll
    for (int i = 0; i < kGroups * kCount; ++i) parts[i / kCount][i % kCount].Reset();
  }
};

// Of all warps' results for a head, 4 columns.
template <typename Cache, int kDim, int kGroups>
__device__ PartsSoFar AddWarps(float factor, unsigned char* stage, int row, int column,
                               const float2 (&stats)[kWarps][8 * kGroups]) {
  float max = -INFINITY;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) max = fmaxf(max, stats[warp][row].x);
  const float offset = max == -INFINITY ? 0.0f : max * factor;
  PartsSoFar part;
  part.Reset();
  part.max = max * factor;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) {
    const float2 stat = stats[warp][row];
    const float weight = Exp2(fmaf(stat.x, factor, -offset));
    const float4 x = *reinterpret_cast<const float4*>(
        ResultAddress<Cache, kDim, kGroups>::At(stage, warp, row % 8, column));
    part.sum = fmaf(stat.y, weight, part.sum);
    part.values.x = fmaf(x.x, weight, part.values.x);
    part.values.y = fmaf(x.y, weight, part.values.y);
    part.values.z = fmaf(x.z, weight, part.values.z);
    part.values.w = fmaf(x.w, weight, part.values.w);
  }
  return part;
}

// The end of a part, for heads 8 n and up: it goes to memory, or is added to those before it and
// becomes, behind the last, the output.
template <typename T, typename Cache, int kDim, int kGroups>
__device__ void AddPart(const DecodeParams& p, const StageInfo& info, unsigned char* stage, int n,
                        const float2 (&stats)[kWarps][8 * kGroups],
                        ItemState<kDim, kGroups>& item) {
  constexpr int kFours = kDim / 4;
  const float factor = p.scale.cap_output != 0 ? 1.0f : p.scale.factor;
#pragma unroll
  for (int i = 0; i < ItemState<kDim, kGroups>::kCount; ++i) {
    const int place = static_cast<int>(threadIdx.x) + i * kConsumers;
    const int column = place % kFours * 4;
    const int row = n * 8 + place / kFours;
    if (row >= info.num_heads || column >= p.kv.head_dim) continue;
    const PartsSoFar part = AddWarps<Cache, kDim, kGroups>(factor, stage, row, column, stats);
    const int32_t head = info.first_head + row;
    if (info.num_runs == 1) {
      PartsSoFar& parts = item.parts[n][i];
      parts.Add(part);
      if (info.is_last != kLastOfItem) continue;
      // Without any key (a padding request) the row is zero.
      const float scale = info.end > info.begin ? p.kv.value_scale / parts.sum : 0.0f;
      StoreOutput<T>(p, info.row, head, column, parts.values, scale);
    } else {
      const int64_t partial = PartialRow(p, info.request, head) + info.split;
      *reinterpret_cast<float4*>(p.partials + partial * p.kv.head_dim + column) = part.values;
      if (column != 0) continue;
      *reinterpret_cast<float2*>(p.partial_stats + 2 * partial) = make_float2(part.max, part.sum);
    }
  }
}

// A run's parts have been stored by all threads. Behind the last run of a row all its parts are
// merged.
template <typename T>
__device__ void MergeBehindLast(const DecodeParams& p, const StageInfo& info,
                                uint32_t* runs_before) {
  SyncConsumers();
  if (threadIdx.x == 0) {
    uint32_t* const done =
        p.runs_done + int64_t{info.request} * p.rows.num_query_heads + info.first_head;
    *runs_before = CountRun(done, info.num_runs);
  }
  SyncConsumers();
  if (*runs_before + 1 != static_cast<uint32_t>(info.num_runs)) return;
  for (int row = threadIdx.x / 32; row < info.num_heads; row += kWarps) {
    MergeHead<T>(p, info.request, info.row, info.first_head + row, info.num_splits);
  }
}

template <typename T, typename Cache, int kDim, int kGroups>
__device__ void Attend(const DecodeParams& p, Memory<Cache, kDim, kGroups>& memory) {
  using L = Layout<Cache, kDim, kGroups>;
  const int warp = threadIdx.x / 32;
  const FragmentAddresses addresses;
  WarpState<kDim, kGroups> state;
  ItemState<kDim, kGroups> item;
  state.Reset();
  item.Reset();
  int parts = 0;
  for (Place<L::kStages> place;; place.Advance()) {
    Wait(&memory.full[place.stage], place.parity);
    const StageInfo info = memory.info[place.stage];
    if (info.is_last == kEndOfWork) return;
    unsigned char* const stage = memory.stages[place.stage];
    if (info.is_first != 0) {
      LoadQuery<T, Cache>(stage + 2 * L::kTileBytes, p.kv.head_dim, state);
    }
    const int begin = info.begin - warp * kWarpKeys;
    const int end = info.end - warp * kWarpKeys;
    if (begin < kWarpKeys && end > 0 && begin < end) {
      AttendKeys<T, Cache>(p.scale, begin, end, stage + warp * L::kSubtileBytes, addresses, state);
    }
    if (info.is_last != 0) {
      auto& stats = memory.stats[parts++ % 2];
#pragma unroll
      for (int n = 0; n < kGroups; ++n) {
        __syncwarp();  // all lanes have read the keys
        PutResults<Cache>(stage, n, state, stats[warp]);
        FenceAsyncProxy();  // before the copy engine writes here again
        SyncConsumers();
        AddPart<T, Cache>(p, info, stage, n, stats, item);
        if (n + 1 < kGroups) SyncConsumers();
      }
      state.Reset();
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) Arrive(&memory.empty[place.stage]);
    if (info.is_last != kLastOfItem) continue;
    item.Reset();
    if (info.num_runs > 1) MergeBehindLast<T>(p, info, &memory.runs_before);
  }
}

template <typename T, typename Cache, int kDim, int kGroups>
__global__ void __launch_bounds__(kThreads, DecodeBlocksAtOnce(kDim))
    DecodeKernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char dynamic_memory[];
  auto& memory = *reinterpret_cast<Memory<Cache, kDim, kGroups>*>(dynamic_memory);
  AllowSuccessor();
  if (threadIdx.x == 0) {
    for (int i = 0; i < Layout<Cache, kDim, kGroups>::kStages; ++i) {
      InitBarrier(&memory.full[i], 1);
      InitBarrier(&memory.empty[i], kWarps);
    }
    PublishBarriers();
  }
  if (threadIdx.x == kConsumers && p.decode.kv.num_rows > 0) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&p.keys) : "memory");
    asm volatile("prefetch.tensormap [%0];" ::"l"(&p.values) : "memory");
  }
  __syncthreads();
  WaitForPredecessor();
  if (threadIdx.x >= kConsumers) {
    CopyAll<T>(p, memory);
    return;
  }
  const DecodeParams& decode = p.decode;
  ZeroRows<T>(decode.rows, decode.kv.head_dim, decode.plan->num_rows,
              int64_t{blockIdx.x} * kConsumers + threadIdx.x, int64_t{gridDim.x} * kConsumers);
  Attend<T>(decode, memory);
}

// ---- Host ---------------------------------------------------------------------------------------

// fn(T{}, Cache{}, kDim, kGroups), the latter two as std::integral_constant.
template <typename Fn>
auto WithKernel(AttentionTypes types, int64_t head_dim, int64_t largest_tile, Fn fn) {
  const auto with_dim = [&](auto type, auto cache, auto dim) {
    if (largest_tile <= 8) return fn(type, cache, dim, std::integral_constant<int, 1>());
    return fn(type, cache, dim, std::integral_constant<int, 2>());
  };
  const auto with_types = [&](auto type, auto cache) {
    if (head_dim <= 64) return with_dim(type, cache, std::integral_constant<int, 64>());
    if (head_dim <= 128) return with_dim(type, cache, std::integral_constant<int, 128>());
    LOCKSTEP_CHECK(head_dim <= kMaxTensorCoreHeadDim);
    return with_dim(type, cache, std::integral_constant<int, 256>());
  };
  const auto with_type = [&](auto type) {
    if (types.cache == DType::kF8E4M3) return with_types(type, __nv_fp8_e4m3());
    LOCKSTEP_CHECK(types.cache == types.activations);
    return with_types(type, type);
  };
  LOCKSTEP_CHECK(types.activations != DType::kF32);
  return types.activations == DType::kF16 ? with_type(__half()) : with_type(__nv_bfloat16());
}

// Keys or values of a layer as rows. A box has `box_rows` rows of `box_panels` panels, or, where
// that is 0, of 128 bytes from any column on.
absl::StatusOr<CUtensorMap> MapRows(const PagedKv& kv, const void* data, DType dtype, int box_rows,
                                    int box_panels) {
  if (kv.num_rows == 0) return CUtensorMap{};  // there is nothing to copy
  const int64_t row_bytes = kv.head_dim * SizeOf(dtype);
  const int64_t columns = kPanelBytes / SizeOf(dtype);
  std::vector<TensorMapDim> dims = {
      {.size = box_panels > 0 ? columns : kv.head_dim, .box = static_cast<int>(columns)},
      {.size = kv.num_rows, .stride_bytes = row_bytes, .box = box_rows}};
  if (box_panels > 0) {
    dims.push_back(
        {.size = row_bytes / kPanelBytes, .stride_bytes = kPanelBytes, .box = box_panels});
  }
  return EncodeTensorMap(data, dtype, dims, TensorMapSwizzle::k128Bytes);
}

}  // namespace
}  // namespace decode

absl::StatusOr<int64_t> PrepareDecode(AttentionTypes types, int64_t head_dim,
                                      int64_t largest_tile) {
  return decode::WithKernel(
      types, head_dim, largest_tile,
      [](auto type, auto cache, auto dim, auto groups) -> absl::StatusOr<int64_t> {
        constexpr int kDim = decltype(dim)::value;
        constexpr int kGroups = decltype(groups)::value;
        constexpr int kBytes = sizeof(decode::Memory<decltype(cache), kDim, kGroups>);
        const auto kernel = decode::DecodeKernel<decltype(type), decltype(cache), kDim, kGroups>;
        LOCKSTEP_CUDA(
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
        int device = 0;
        int multiprocessors = 0;
        int blocks = 0;
        LOCKSTEP_CUDA(cudaGetDevice(&device));
        LOCKSTEP_CUDA(
            cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
        LOCKSTEP_CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel,
                                                                    decode::kThreads, kBytes));
        if (blocks < 1) {
          return absl::FailedPreconditionError(
              absl::StrFormat("the decode attention kernel for head_dim %d needs %d bytes of "
                              "shared memory: more than this device has",
                              kDim, kBytes));
        }
        return int64_t{multiprocessors} * blocks;
      });
}

absl::Status LaunchDecode(const DecodeParams& params, AttentionTypes types, int64_t num_blocks,
                          bool programmatic, CudaStream stream) {
  int largest_tile = 0;
  for (int i = 0; i < params.num_head_tiles; ++i) {
    largest_tile = std::max<int>(largest_tile, params.head_tiles[i].num_heads);
  }
  decode::Params kernel_params = {};
  kernel_params.decode = params;
  kernel_params.box_rows = std::gcd(params.kv.block_size, decode::kWarpKeys);
  const bool all_panels = kernel_params.box_rows == decode::kWarpKeys &&
                          params.kv.head_dim * SizeOf(types.cache) % kPanelBytes == 0;
  kernel_params.boxes_of_row = all_panels ? 1 : 0;
  return decode::WithKernel(
      types, params.kv.head_dim, largest_tile,
      [&](auto type, auto cache, auto dim, auto groups) -> absl::Status {
        constexpr int kDim = decltype(dim)::value;
        constexpr int kGroups = decltype(groups)::value;
        const int box_panels =
            all_panels ? decode::Layout<decltype(cache), kDim, kGroups>::kPanels : 0;
        LOCKSTEP_ASSIGN_OR_RETURN(kernel_params.keys,
                                  decode::MapRows(params.kv, params.kv.keys, types.cache,
                                                  kernel_params.box_rows, box_panels));
        LOCKSTEP_ASSIGN_OR_RETURN(kernel_params.values,
                                  decode::MapRows(params.kv, params.kv.values, types.cache,
                                                  kernel_params.box_rows, box_panels));
        return LaunchKernel(decode::DecodeKernel<decltype(type), decltype(cache), kDim, kGroups>,
                            dim3(static_cast<unsigned>(num_blocks)), decode::kThreads,
                            sizeof(decode::Memory<decltype(cache), kDim, kGroups>), kernel_params,
                            programmatic, stream, "launch of decode attention");
      });
}

}  // namespace lockstep
