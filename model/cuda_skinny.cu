// y = x * W^T for at most 16 rows of x. Bound by the read of W, so everything serves that read:
//
// - A block a multiprocessor owns a contiguous share of W's rows, equal to one row.
// - One thread, the producer, pulls the share through a ring of stages in shared memory: a box of
//   `tile_rows` rows of W times `stage_cols` columns with one tensor copy, and the same columns of
//   x behind it with another, both completing on the stage's mbarrier. (One bulk copy a row took 75
//   cycles a row to issue, three times what the memory needs for it.) The ring takes half of a
//   multiprocessor's shared memory, so that with programmatic launches the next kernel fills its
//   ring while this one drains: W's copies wait for nobody, x's wait for the kernel before.
// - Eight warps consume. Tensor cores multiply 16 rows of W by 8 rows of x: the rows that x has not
//   cost nothing that is scarce, and what stands in shared memory for them meets no row that is
//   stored. Warps share out rows (two halves of 16) and columns (slices of 64 dealt in turn to
//   four), and add up their four parts in shared memory at the end of a tile.
//
// A lane's share of 32 columns of a row is 16 bytes: columns 8q to 8q+7 of row g (g = lane / 4, q =
// lane % 4). The tensor core wants other columns in a lane, but a product may take its columns in
// any order that is the same for both operands; this one needs no rearrangement of either. Eight
// lanes that read together read 64 bytes of two rows, which are a multiple of 128 bytes apart: so
// that they meet each of the 32 banks once, odd rows read the second half of a slice first.
//
// Columns beyond K are zeros in both operands (the copy fills them in); rows beyond the share
// belong to the next block or are zeros, and are not stored.
#include <cuda.h>

#include <algorithm>
#include <limits>

#include "model/cuda_async_copy.cuh"
#include "model/cuda_kernel.cuh"
#include "model/cuda_skinny.h"

namespace lockstep {

namespace {

constexpr int kSliceCols = 64;   // 128 bytes: what a warp takes at once, four products of 16
constexpr int kColumnWarps = 4;  // that share the slices
constexpr int kRowWarps = 2;     // that share the rows
constexpr int kConsumers = kColumnWarps * kRowWarps * 32;
constexpr int kThreads = kConsumers + 32;
constexpr int kMaxTileRows = 16 * kRowWarps;
constexpr int kStageUnit = kSliceCols * kColumnWarps;  // columns of a stage: one or two of these
constexpr int kMaxStages = 16;
constexpr int kStageAlignment = 128;  // of a tensor copy
// Stride of a token's partial sums, in floats: lanes of a warp (8 rows of 4 even tokens) hit each
// bank once, as 2 * 36 mod 32 = 8.
constexpr int kPartStride = kMaxTileRows + 4;
// A block may have 227 KB. Two blocks fit a multiprocessor at (228 KB - 2 * 1 KB that the system
// takes) / 2 = 113 KB each, less the barriers.
constexpr int kMaxSharedKib = 224;
// A stage of two units at most: enough stages must fit for some 64 KB to be on their way.
constexpr int64_t kLargestWideStage = 20 * 1024;

struct SkinnyArgs {
  CUtensorMap weight_map;
  CUtensorMap x_map;
  const void* bias;
  void* y;
  int64_t y_stride;  // elements
  int n;
  int tokens;
  int tile_rows;
  int stage_cols;
  int num_stages;
  int chunks;  // stages a tile
};

__device__ __forceinline__ void PrefetchMap(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}
// The map's box at this column (in words of 4 bytes) and row.
__device__ __forceinline__ void CopyBox(void* to, const CUtensorMap& map, int word, int row,
                                        uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, "
      "{%2, %3}], [%4];" ::"r"(SharedAddress(to)),
      "l"(&map), "r"(word), "r"(row), "r"(SharedAddress(barrier))
      : "memory");
}

// sums[16 rows, 8 tokens] += a[16, 16] * b[16, 8], one warp.
template <typename T>
__device__ __forceinline__ void MultiplyAdd(float (&sums)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                            uint32_t a3, uint32_t b0, uint32_t b1);
template <>
__device__ __forceinline__ void MultiplyAdd<__nv_bfloat16>(float (&sums)[4], uint32_t a0,
                                                           uint32_t a1, uint32_t a2, uint32_t a3,
                                                           uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void MultiplyAdd<__half>(float (&sums)[4], uint32_t a0, uint32_t a1,
                                                    uint32_t a2, uint32_t a3, uint32_t b0,
                                                    uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__host__ __device__ constexpr int RoundUp(int bytes, int unit) {
  return (bytes + unit - 1) / unit * unit;
}
// A stage: rows of W, then rows of x.
__host__ __device__ inline int StageBytes(int tile_rows, int tokens, int stage_cols) {
  return RoundUp((tile_rows + tokens) * stage_cols * 2, kStageAlignment);
}

// The shared memory of a block, and its share of the product.
struct Ring {
  const SkinnyArgs& args;
  char* stages;
  uint64_t* full;   // copies have landed
  uint64_t* empty;  // every consumer warp is done
  int first_row;    // of the block's share
  int num_rows;

  __device__ int num_tiles() const { return (num_rows + args.tile_rows - 1) / args.tile_rows; }
  __device__ char* Stage(int stage) const {
    return stages + stage * StageBytes(args.tile_rows, args.tokens, args.stage_cols);
  }
};

// W's rows of this step into its stage.
__device__ __forceinline__ void ProduceWeights(const Ring& ring, int step) {
  const SkinnyArgs& args = ring.args;
  const int stage = step % args.num_stages;
  const int tile = step / args.chunks, chunk = step % args.chunks;
  ArriveExpecting(ring.full + stage, (args.tile_rows + args.tokens) * args.stage_cols * 2);
  CopyBox(ring.Stage(stage), args.weight_map, chunk * args.stage_cols / 2,
          ring.first_row + tile * args.tile_rows, ring.full + stage);
}

// The same columns of x behind them.
__device__ __forceinline__ void ProduceTokens(const Ring& ring, int step) {
  const SkinnyArgs& args = ring.args;
  const int stage = step % args.num_stages;
  CopyBox(ring.Stage(stage) + args.tile_rows * args.stage_cols * 2, args.x_map,
          step % args.chunks * args.stage_cols / 2, 0, ring.full + stage);
}

// One thread.
__device__ void Produce(const Ring& ring) {
  const int steps = ring.num_tiles() * ring.args.chunks, stages = ring.args.num_stages;
  const int ahead = min(steps, stages);
  PrefetchMap(ring.args.weight_map);
  PrefetchMap(ring.args.x_map);
#pragma unroll 1
  for (int step = 0; step < ahead; ++step) ProduceWeights(ring, step);
  WaitForPredecessor();
#pragma unroll 1
  for (int step = 0; step < ahead; ++step) ProduceTokens(ring, step);
#pragma unroll 1
  for (int step = ahead; step < steps; ++step) {
    Wait(ring.empty + step % stages, (step / stages - 1) & 1);
    ProduceWeights(ring, step);
    ProduceTokens(ring, step);
  }
  // Not before: blocks of the next kernel that wait for a place meet multiprocessors that become
  // free early, and two of them on one read half as fast.
  LetSuccessorStart();
}

// 32 columns of a row: its first and second 16 for the tensor core.
struct Slice {
  uint4 first, second;
};

// This lane's part of 64 columns. `row`: its part of the slice's first half; odd: the row is an odd
// one.
__device__ __forceinline__ Slice LoadSlice(const char* row, bool odd) {
  const uint4 now = *reinterpret_cast<const uint4*>(row + (odd ? 64 : 0));
  const uint4 then = *reinterpret_cast<const uint4*>(row + (odd ? 0 : 64));
  return {{odd ? then.x : now.x, odd ? then.y : now.y, odd ? then.z : now.z, odd ? then.w : now.w},
          {odd ? now.x : then.x, odd ? now.y : then.y, odd ? now.z : then.z, odd ? now.w : then.w}};
}

template <typename T>
__device__ __forceinline__ void MultiplyAdd(float (&sums)[4], const uint4& low, const uint4& high,
                                            const uint4& x) {
  MultiplyAdd<T>(sums, low.x, high.x, low.y, high.y, x.x, x.y);
  MultiplyAdd<T>(sums, low.z, high.z, low.w, high.w, x.z, x.w);
}

// This warp's part of one stage's product.
template <typename T, int kTokenTiles>
__device__ __forceinline__ void MultiplyStage(const Ring& ring, const char* stage, int warp,
                                              int lane, float (&sums)[kTokenTiles][4]) {
  const SkinnyArgs& args = ring.args;
  const int g = lane / 4, bytes = args.stage_cols * 2;
  const int first = warp % kColumnWarps * kSliceCols * 2 + lane % 4 * 16;
  const bool odd = g % 2 != 0;
  // Rows that are not there: any that is.
  const int row = warp / kColumnWarps * 16 + g;
  const char* low = stage + min(row, args.tile_rows - 1) * bytes + first;
  const char* high = stage + min(row + 8, args.tile_rows - 1) * bytes + first;
  const char* tokens[kTokenTiles];
#pragma unroll
  for (int tile = 0; tile < kTokenTiles; ++tile) {
    tokens[tile] = stage + (args.tile_rows + min(tile * 8 + g, args.tokens - 1)) * bytes + first;
  }
  for (int offset = 0; offset < bytes; offset += kStageUnit * 2) {
    const Slice a = LoadSlice(low + offset, odd);
    const Slice b = LoadSlice(high + offset, odd);
#pragma unroll
    for (int tile = 0; tile < kTokenTiles; ++tile) {
      const Slice x = LoadSlice(tokens[tile] + offset, odd);
      MultiplyAdd<T>(sums[tile], a.first, b.first, x.first);
      MultiplyAdd<T>(sums[tile], a.second, b.second, x.second);
    }
  }
}

__device__ __forceinline__ void ConsumersMeet() {
  asm volatile("bar.sync 1, %0;" ::"n"(kConsumers) : "memory");
}

// parts [kColumnWarps][kTokenTiles * 8][kPartStride]: a buffer of partial sums.
template <typename Out, int kTokenTiles>
__device__ void FinishTile(const Ring& ring, int tile, int warp, int lane, float* parts,
                           const float (&sums)[kTokenTiles][4]) {
  constexpr int kPart = kTokenTiles * 8 * kPartStride;
  const int row = warp / kColumnWarps * 16 + lane / 4;
  float* mine = parts + warp % kColumnWarps * kPart;
#pragma unroll
  for (int i = 0; i < kTokenTiles; ++i) {
    float* token = mine + (i * 8 + lane % 4 * 2) * kPartStride;
    token[row] = sums[i][0];
    token[kPartStride + row] = sums[i][1];
    token[row + 8] = sums[i][2];
    token[kPartStride + row + 8] = sums[i][3];
  }
  ConsumersMeet();
  const SkinnyArgs& args = ring.args;
  const int rows = min(args.tile_rows, ring.num_rows - tile * args.tile_rows);
  for (int i = threadIdx.x; i < args.tokens * kMaxTileRows; i += kConsumers) {
    const int r = i % kMaxTileRows, token = i / kMaxTileRows;
    if (r >= rows) continue;
    const float* part = parts + token * kPartStride + r;
    float sum = 0;
#pragma unroll
    for (int w = 0; w < kColumnWarps; ++w) sum += part[w * kPart];
    const int64_t col = ring.first_row + tile * args.tile_rows + r;
    if (args.bias != nullptr) sum += Widen(static_cast<const Out*>(args.bias)[col]);
    static_cast<Out*>(args.y)[token * args.y_stride + col] = Narrow<Out>(sum);
  }
}

// Where there is room for two, buffers of partial sums are used by turns: who writes one has met
// all others since they read it. The single one needs another meeting.
__host__ __device__ constexpr int NumPartBuffers(int token_tiles) {
  return token_tiles == 1 ? 2 : 1;
}
__host__ __device__ constexpr int PartBufferFloats(int token_tiles) {
  return kColumnWarps * token_tiles * 8 * kPartStride;
}

template <typename T, typename Out, int kTokenTiles>
__device__ void Consume(const Ring& ring, float* parts, int warp, int lane) {
  constexpr int kBuffers = NumPartBuffers(kTokenTiles);
  const SkinnyArgs& args = ring.args;
  // What was read and written before this kernel is done with: y may be overwritten.
  WaitForPredecessor();
  const bool has_rows = warp / kColumnWarps * 16 < args.tile_rows;
  int step = 0;
  for (int tile = 0; tile < ring.num_tiles(); ++tile) {
    float sums[kTokenTiles][4] = {};
    for (int chunk = 0; chunk < args.chunks; ++chunk, ++step) {
      const int stage = step % args.num_stages;
      Wait(ring.full + stage, (step / args.num_stages) & 1);
      if (has_rows) MultiplyStage<T, kTokenTiles>(ring, ring.Stage(stage), warp, lane, sums);
      __syncwarp();
      if (lane == 0) Arrive(ring.empty + stage);
    }
    if (kBuffers == 1 && tile > 0) ConsumersMeet();
    float* buffer = parts + tile % kBuffers * PartBufferFloats(kTokenTiles);
    FinishTile<Out, kTokenTiles>(ring, tile, warp, lane, buffer, sums);
  }
}

template <typename T, typename Out, int kTokenTiles>
__global__ void __launch_bounds__(kThreads, 2)
    SkinnyLinearKernel(const __grid_constant__ SkinnyArgs args) {
  extern __shared__ __align__(128) char shared[];
  __shared__ uint64_t full[kMaxStages], empty[kMaxStages];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first_row = static_cast<int>(int64_t{args.n} * blockIdx.x / gridDim.x);
  const int end_row = static_cast<int>(int64_t{args.n} * (blockIdx.x + 1) / gridDim.x);
  const Ring ring = {args, shared, full, empty, first_row, end_row - first_row};
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < args.num_stages; ++stage) {
      InitBarrier(full + stage, 1);
      InitBarrier(empty + stage, kConsumers / 32);
    }
    PublishBarriers();
  }
  __syncthreads();
  if (warp == kConsumers / 32) {
    if (lane == 0) Produce(ring);
  } else {
    float* parts = reinterpret_cast<float*>(ring.Stage(args.num_stages));
    Consume<T, Out, kTokenTiles>(ring, parts, warp, lane);
  }
}

// Sizes of tiles and stages; the bytes of shared memory they take.
int64_t ChooseTiles(int grid, int64_t k, int token_tiles, const SkinnyTuning& tuning,
                    SkinnyArgs* args) {
  const int share = (args->n + grid - 1) / grid;
  const int tiles = (share + tuning.max_tile_rows - 1) / tuning.max_tile_rows;
  args->tile_rows = (share + tiles - 1) / tiles;
  args->stage_cols = tuning.stage_cols;
  if (args->stage_cols == 0) {
    const int wide = StageBytes(args->tile_rows, args->tokens, 2 * kStageUnit);
    args->stage_cols = wide <= kLargestWideStage ? 2 * kStageUnit : kStageUnit;
  }
  args->chunks = static_cast<int>((k + args->stage_cols - 1) / args->stage_cols);
  const int64_t stage_bytes = StageBytes(args->tile_rows, args->tokens, args->stage_cols);
  const int64_t parts_bytes =
      int64_t{NumPartBuffers(token_tiles)} * PartBufferFloats(token_tiles) * 4;
  args->num_stages = static_cast<int>(
      std::min<int64_t>(kMaxStages, (tuning.shared_kib * 1024 - parts_bytes) / stage_bytes));
  LOCKSTEP_CHECK(args->num_stages >= 2);
  return args->num_stages * stage_bytes + parts_bytes;
}

bool Is16Bit(DType dtype) { return dtype == DType::kBF16 || dtype == DType::kF16; }

// fn(kernel) of these types and token tiles.
template <typename Fn>
absl::Status WithKernel(DType dtype, bool f32_out, int token_tiles, const Fn& fn) {
  const auto of = [&]<typename T>() {
    if (f32_out) {
      return fn(token_tiles == 1 ? SkinnyLinearKernel<T, float, 1>
                                 : SkinnyLinearKernel<T, float, 2>);
    }
    return fn(token_tiles == 1 ? SkinnyLinearKernel<T, T, 1> : SkinnyLinearKernel<T, T, 2>);
  };
  return dtype == DType::kBF16 ? of.template operator()<__nv_bfloat16>()
                               : of.template operator()<__half>();
}

using EncodeTensorMap = decltype(&cuTensorMapEncodeTiled);

// Boxes of box_rows x box_cols of a matrix of 16-bit elements. In words of 4 bytes, as a box has at
// most 256 of whatever it counts in.
absl::Status EncodeBoxes(EncodeTensorMap encode, const MatrixView& m, int box_rows, int box_cols,
                         int l2_promotion_bytes, CUtensorMap* map) {
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(m.cols / 2), static_cast<cuuint64_t>(m.rows)};
  // A single row may have any distance from the next.
  const cuuint64_t stride_bytes[] = {static_cast<cuuint64_t>(m.rows == 1 ? m.cols : m.stride) * 2};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(box_cols / 2),
                            static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t steps[] = {1, 1};
  const CUtensorMapL2promotion promotion =
      l2_promotion_bytes == 256   ? CU_TENSOR_MAP_L2_PROMOTION_L2_256B
      : l2_promotion_bytes == 128 ? CU_TENSOR_MAP_L2_PROMOTION_L2_128B
      : l2_promotion_bytes == 64  ? CU_TENSOR_MAP_L2_PROMOTION_L2_64B
                                  : CU_TENSOR_MAP_L2_PROMOTION_NONE;
  const CUresult code =
      encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT32, 2, m.data, sizes, stride_bytes, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE, promotion,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (code == CUDA_SUCCESS) return absl::OkStatus();
  return absl::InternalError(
      absl::StrFormat("cuTensorMapEncodeTiled: error %d for boxes [%d, %d] of [%d, %d]",
                      static_cast<int>(code), box_rows, box_cols, m.rows, m.cols));
}

}  // namespace

absl::StatusOr<SkinnyLinear> SkinnyLinear::Create(int num_multiprocessors) {
  SkinnyLinear linear;
  linear.num_multiprocessors_ = num_multiprocessors;
  cudaDriverEntryPointQueryResult found;
  LOCKSTEP_CUDA(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &linear.encode_, 12000,
                                                 cudaEnableDefault, &found));
  if (found != cudaDriverEntryPointSuccess || linear.encode_ == nullptr) {
    return absl::FailedPreconditionError("the driver has no cuTensorMapEncodeTiled");
  }
  // The carveout, too: a multiprocessor that had to change it could not begin one kernel while it
  // ends another.
  const auto allow = [](auto kernel) {
    const absl::Status status =
        CudaStatus(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                        kMaxSharedKib * 1024),
                   "shared memory of a product");
    if (!status.ok()) return status;
    return CudaStatus(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                           cudaSharedmemCarveoutMaxShared),
                      "shared memory of a product");
  };
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    for (const bool f32_out : {false, true}) {
      for (const int token_tiles : {1, 2}) {
        LOCKSTEP_RETURN_IF_ERROR(WithKernel(dtype, f32_out, token_tiles, allow));
      }
    }
  }
  return linear;
}

bool SkinnyLinear::Supports(const MatrixView& x, const MatrixView& weight, const MatrixView& y) {
  constexpr int64_t kMaxInt = std::numeric_limits<int>::max();
  return Is16Bit(x.dtype) && weight.dtype == x.dtype &&
         (y.dtype == x.dtype || y.dtype == DType::kF32) && x.rows > 0 && x.rows <= kMaxRows &&
         x.cols > 0 && x.cols % 8 == 0 && x.cols < kMaxInt / 4 && weight.rows > 0 &&
         weight.rows < kMaxInt / 4 && RowsAligned16(x) && RowsAligned16(weight);
}

absl::Status SkinnyLinear::Run(const MatrixView& x, const MatrixView& weight, const void* bias,
                               const MatrixView& y, CudaStream stream, bool programmatic_launch,
                               const SkinnyTuning& tuning) const {
  LOCKSTEP_CHECK(tuning.shared_kib <= kMaxSharedKib && tuning.max_tile_rows > 0 &&
                 tuning.max_tile_rows <= kMaxTileRows && tuning.stage_cols % kStageUnit == 0 &&
                 tuning.stage_cols <= 2 * kStageUnit);
  LOCKSTEP_CHECK(Supports(x, weight, y));
  LOCKSTEP_CHECK(x.cols == weight.cols && y.rows == x.rows && y.cols == weight.rows);
  const int grid = static_cast<int>(std::min<int64_t>(num_multiprocessors_, weight.rows));
  const int token_tiles = x.rows <= 8 ? 1 : 2;
  SkinnyArgs args = {};
  args.bias = bias;
  args.y = y.data;
  args.y_stride = y.stride;
  args.n = static_cast<int>(weight.rows);
  args.tokens = static_cast<int>(x.rows);
  const int64_t shared_bytes = ChooseTiles(grid, x.cols, token_tiles, tuning, &args);
  const auto encode = reinterpret_cast<EncodeTensorMap>(encode_);
  LOCKSTEP_RETURN_IF_ERROR(EncodeBoxes(encode, weight, args.tile_rows, args.stage_cols,
                                       tuning.l2_promotion_bytes, &args.weight_map));
  LOCKSTEP_RETURN_IF_ERROR(
      EncodeBoxes(encode, x, args.tokens, args.stage_cols, tuning.l2_promotion_bytes, &args.x_map));
  const CudaLaunch launch = {stream, programmatic_launch};
  return WithKernel(x.dtype, y.dtype == DType::kF32, token_tiles, [&](auto kernel) {
    return LaunchKernel("launch of a product of few rows", kernel, grid, kThreads, shared_bytes,
                        launch, args);
  });
}

}  // namespace lockstep
