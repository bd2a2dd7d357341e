// y = x * W^T for at most 16 rows of x. Bound by the read of W, so everything serves that read:
//
// - A block a multiprocessor owns a contiguous share of W's rows, equal to one row.
// - One warp, the producer, pulls the share through a ring of stages in shared memory with bulk
// copies
//   that complete on mbarriers. A stage is `tile_rows` rows of W times `stage_cols` columns, and
//   the same columns of x behind them. The ring takes half of a multiprocessor's shared memory, so
//   that with programmatic launches the next kernel fills its ring while this one drains: W's
//   copies wait for nobody, x's wait for the kernel before.
// - Eight warps consume. Tensor cores multiply 16 rows of W by 8 rows of x: the rows that x has not
//   cost nothing that is scarce, and what stands in shared memory for them, garbage, meets no row
//   that is stored. Warps share out rows (two halves of 16) and columns (slices of 32 dealt in turn
//   to four), and add up their four parts in shared memory at the end of a tile.
//
// A lane's share of a slice is 16 bytes of a row: columns 8q to 8q+7 of row g (g = lane / 4, q =
// lane % 4). The tensor core wants other columns in a lane, but a product may take its columns in
// any order that is the same for both operands; this one needs no rearrangement of either. Rows are
// 64 bytes more apart than a multiple of 128, so 8 lanes that read together, two rows, meet each of
// the 32 banks once.
#include <algorithm>
#include <limits>

#include "model/cuda_gemv.h"
#include "model/cuda_kernel.cuh"

namespace lockstep {

namespace {

constexpr int kSliceCols = 32;   // columns of one step of a warp: two products of 16
constexpr int kColumnWarps = 4;  // that share the slices
constexpr int kRowWarps = 2;     // that share the rows
constexpr int kConsumers = kColumnWarps * kRowWarps * 32;
constexpr int kThreads = kConsumers + 32;
constexpr int kMaxTileRows = 16 * kRowWarps;
constexpr int kStageUnit = kSliceCols * kColumnWarps;  // columns of a stage are a multiple
constexpr int kMaxStageCols = 1024;
constexpr int kMaxStages = 8;
constexpr int kRowPadBytes = 64;
// Stride of a token's partial sums, in floats: lanes of a warp (8 rows of 4 even tokens) hit each
// bank once, as 2 * 36 mod 32 = 8.
constexpr int kPartStride = kMaxTileRows + 4;
// Two blocks fit a multiprocessor: (228 KB - 2 * 1 KB that the system takes) / 2 = 113 KB each,
// less the barriers.
constexpr int kSharedBytes = 112 * 1024;
// Elements of a stage to aim for: 20 KB, four or five stages in the ring.
constexpr int64_t kStageElements = 10240;

struct SkinnyArgs {
  const void* x;
  const void* weight;
  const void* bias;
  void* y;
  int64_t x_stride_bytes;
  int64_t weight_stride_bytes;
  int64_t y_stride;  // elements
  int n;
  int k;
  int tokens;
  int tile_rows;
  int stage_cols;
  int num_stages;
};

__device__ __forceinline__ uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}
__device__ __forceinline__ void InitBarrier(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(SharedAddress(barrier)), "r"(arrivals)
               : "memory");
}
__device__ __forceinline__ void Arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(SharedAddress(barrier)) : "memory");
}
// Arrives, and makes the barrier wait for so many bytes of copies.
__device__ __forceinline__ void ArriveExpecting(uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(SharedAddress(barrier)),
               "r"(bytes)
               : "memory");
}
// Until the barrier's phase of this parity is complete.
__device__ __forceinline__ void Wait(uint64_t* barrier, int parity) {
  uint32_t done = 0;
  while (done == 0) {
    asm volatile(
        "{\n"
        ".reg .pred complete;\n"
        "mbarrier.try_wait.parity.shared.b64 complete, [%1], %2;\n"
        "selp.u32 %0, 1, 0, complete;\n"
        "}\n"
        : "=r"(done)
        : "r"(SharedAddress(barrier)), "r"(parity)
        : "memory");
  }
}
// Bytes and both addresses are multiples of 16.
__device__ __forceinline__ void CopyToShared(void* to, const void* from, int bytes,
                                             uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(SharedAddress(to)),
      "l"(from), "r"(bytes), "r"(SharedAddress(barrier))
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

// The shared memory of a block, and which part of the product a stage holds.
struct Ring {
  const SkinnyArgs& args;
  char* stages;
  uint64_t* full;   // copies have landed
  uint64_t* empty;  // every consumer warp is done
  int first_row;    // of the block's share
  int num_rows;
  int chunks;  // stages a tile

  __device__ int row_bytes() const { return args.stage_cols * 2 + kRowPadBytes; }
  __device__ int num_tiles() const { return (num_rows + args.tile_rows - 1) / args.tile_rows; }
  __device__ int num_steps() const { return num_tiles() * chunks; }
  __device__ int TileRows(int tile) const {
    return min(args.tile_rows, num_rows - tile * args.tile_rows);
  }
  __device__ int Cols(int chunk) const {
    return min(args.stage_cols, args.k - chunk * args.stage_cols);
  }
  __device__ char* Stage(int stage) const {
    return stages + stage * (args.tile_rows + args.tokens) * row_bytes();
  }
};

// W's rows of this step into its stage: a row a lane.
__device__ void ProduceWeights(const Ring& ring, int step, int lane) {
  const SkinnyArgs& args = ring.args;
  const int stage = step % args.num_stages;
  const int tile = step / ring.chunks, chunk = step % ring.chunks;
  const int rows = ring.TileRows(tile), bytes = ring.Cols(chunk) * 2;
  if (lane == 0) ArriveExpecting(ring.full + stage, (rows + args.tokens) * bytes);
  __syncwarp();
  if (lane >= rows) return;
  const int64_t row = ring.first_row + tile * args.tile_rows + lane;
  CopyToShared(ring.Stage(stage) + lane * ring.row_bytes(),
               static_cast<const char*>(args.weight) + row * args.weight_stride_bytes +
                   int64_t{chunk} * args.stage_cols * 2,
               bytes, ring.full + stage);
}

// The same columns of x behind them.
__device__ void ProduceTokens(const Ring& ring, int step, int lane) {
  const SkinnyArgs& args = ring.args;
  if (lane >= args.tokens) return;
  const int stage = step % args.num_stages;
  const int chunk = step % ring.chunks;
  CopyToShared(ring.Stage(stage) + (args.tile_rows + lane) * ring.row_bytes(),
               static_cast<const char*>(args.x) + lane * args.x_stride_bytes +
                   int64_t{chunk} * args.stage_cols * 2,
               ring.Cols(chunk) * 2, ring.full + stage);
}

__device__ void Produce(const Ring& ring, int lane) {
  const int steps = ring.num_steps(), stages = ring.args.num_stages;
  const int ahead = min(steps, stages);
  for (int step = 0; step < ahead; ++step) ProduceWeights(ring, step, lane);
  WaitForPredecessor();
  for (int step = 0; step < ahead; ++step) ProduceTokens(ring, step, lane);
  for (int step = ahead; step < steps; ++step) {
    Wait(ring.empty + step % stages, (step / stages - 1) & 1);
    ProduceWeights(ring, step, lane);
    ProduceTokens(ring, step, lane);
  }
}

// This warp's part of one stage's product.
template <typename T, int kTokenTiles>
__device__ __forceinline__ void MultiplyStage(const Ring& ring, const char* stage, int slices,
                                              int warp, int lane, float (&sums)[kTokenTiles][4]) {
  const int g = lane / 4, q = lane % 4, bytes = ring.row_bytes();
  const int row = warp / kColumnWarps * 16 + g;
  // Rows that are not there: any that is.
  const char* low = stage + min(row, ring.args.tile_rows - 1) * bytes + q * 16;
  const char* high = stage + min(row + 8, ring.args.tile_rows - 1) * bytes + q * 16;
  const char* tokens[kTokenTiles];
#pragma unroll
  for (int tile = 0; tile < kTokenTiles; ++tile) {
    const int token = min(tile * 8 + g, ring.args.tokens - 1);
    tokens[tile] = stage + (ring.args.tile_rows + token) * bytes + q * 16;
  }
#pragma unroll 2
  for (int slice = warp % kColumnWarps; slice < slices; slice += kColumnWarps) {
    const int offset = slice * kSliceCols * 2;
    const uint4 a = *reinterpret_cast<const uint4*>(low + offset);
    const uint4 b = *reinterpret_cast<const uint4*>(high + offset);
#pragma unroll
    for (int tile = 0; tile < kTokenTiles; ++tile) {
      const uint4 x = *reinterpret_cast<const uint4*>(tokens[tile] + offset);
      MultiplyAdd<T>(sums[tile], a.x, b.x, a.y, b.y, x.x, x.y);
      MultiplyAdd<T>(sums[tile], a.z, b.z, a.w, b.w, x.z, x.w);
    }
  }
}

// parts [kColumnWarps][tokens][kPartStride]: one buffer of partial sums.
template <typename T, typename Out, int kTokenTiles>
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
  asm volatile("bar.sync 1, %0;" ::"n"(kConsumers) : "memory");
  const SkinnyArgs& args = ring.args;
  const int rows = ring.TileRows(tile);
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

template <typename T, typename Out, int kTokenTiles>
__device__ void Consume(const Ring& ring, float* parts, int warp, int lane) {
  constexpr int kBuffer = kColumnWarps * kTokenTiles * 8 * kPartStride;
  const SkinnyArgs& args = ring.args;
  // What was read and written before this kernel is done with: y may be overwritten.
  WaitForPredecessor();
  const bool has_rows = warp / kColumnWarps * 16 < args.tile_rows;
  int step = 0;
  for (int tile = 0; tile < ring.num_tiles(); ++tile) {
    float sums[kTokenTiles][4] = {};
    for (int chunk = 0; chunk < ring.chunks; ++chunk, ++step) {
      const int stage = step % args.num_stages;
      Wait(ring.full + stage, (step / args.num_stages) & 1);
      if (has_rows) {
        MultiplyStage<T, kTokenTiles>(ring, ring.Stage(stage), ring.Cols(chunk) / kSliceCols, warp,
                                      lane, sums);
      }
      __syncwarp();
      if (lane == 0) Arrive(ring.empty + stage);
    }
    // Two buffers by turns: whoever writes one has met all others after they read it.
    FinishTile<T, Out, kTokenTiles>(ring, tile, warp, lane, parts + tile % 2 * kBuffer, sums);
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
  const int chunks = (args.k + args.stage_cols - 1) / args.stage_cols;
  const Ring ring = {args, shared, full, empty, first_row, end_row - first_row, chunks};
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < args.num_stages; ++stage) {
      InitBarrier(full + stage, 1);
      InitBarrier(empty + stage, kConsumers / 32);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  LetSuccessorStart();
  if (warp == kConsumers / 32) {
    Produce(ring, lane);
  } else {
    float* parts = reinterpret_cast<float*>(ring.Stage(args.num_stages));
    Consume<T, Out, kTokenTiles>(ring, parts, warp, lane);
  }
}

// Sizes of tiles and stages; the bytes of shared memory they take.
int64_t ChooseTiles(int grid, int token_tiles, SkinnyArgs* args) {
  const int share = (args->n + grid - 1) / grid;
  const int tiles = (share + kMaxTileRows - 1) / kMaxTileRows;
  args->tile_rows = (share + tiles - 1) / tiles;
  const int64_t stage_rows = args->tile_rows + args->tokens;
  const int64_t cols = (kStageElements / stage_rows + kStageUnit / 2) / kStageUnit * kStageUnit;
  const int64_t all_cols = (args->k + kStageUnit - 1) / kStageUnit * kStageUnit;
  args->stage_cols = static_cast<int>(
      std::min(all_cols, std::clamp(cols, int64_t{kStageUnit}, int64_t{kMaxStageCols})));
  const int64_t stage_bytes = stage_rows * (args->stage_cols * 2 + kRowPadBytes);
  const int64_t parts_bytes = int64_t{2} * kColumnWarps * token_tiles * 8 * kPartStride * 4;
  args->num_stages =
      static_cast<int>(std::min<int64_t>(kMaxStages, (kSharedBytes - parts_bytes) / stage_bytes));
  LOCKSTEP_CHECK(args->num_stages >= 2);
  return args->num_stages * stage_bytes + parts_bytes;
}

bool Is16Bit(DType dtype) { return dtype == DType::kBF16 || dtype == DType::kF16; }

// fn(kernel) for every kernel, or for the one of these types and token tiles.
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

}  // namespace

bool SkinnyLinearSupports(const MatrixView& x, const MatrixView& weight, const MatrixView& y) {
  constexpr int64_t kMaxInt = std::numeric_limits<int>::max();
  return Is16Bit(x.dtype) && weight.dtype == x.dtype &&
         (y.dtype == x.dtype || y.dtype == DType::kF32) && x.rows > 0 && x.rows <= kMaxSkinnyRows &&
         x.cols > 0 && x.cols % kSliceCols == 0 && x.cols < kMaxInt / 4 && weight.rows > 0 &&
         weight.rows < kMaxInt / 4 && RowsAligned16(x) && RowsAligned16(weight);
}

absl::Status PrepareSkinnyLinear() {
  // The carveout, too: a multiprocessor that had to change it could not begin one kernel while it
  // ends another.
  const auto allow = [](auto kernel) {
    const absl::Status status = CudaStatus(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes),
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
  return absl::OkStatus();
}

absl::Status SkinnyLinear(const MatrixView& x, const MatrixView& weight, const void* bias,
                          const MatrixView& y, int num_multiprocessors, CudaStream stream,
                          bool programmatic_launch) {
  LOCKSTEP_CHECK(SkinnyLinearSupports(x, weight, y));
  LOCKSTEP_CHECK(x.cols == weight.cols && y.rows == x.rows && y.cols == weight.rows);
  const int grid = static_cast<int>(std::min<int64_t>(num_multiprocessors, weight.rows));
  const int token_tiles = x.rows <= 8 ? 1 : 2;
  SkinnyArgs args = {x.data,
                     weight.data,
                     bias,
                     y.data,
                     x.stride * 2,
                     weight.stride * 2,
                     y.stride,
                     static_cast<int>(weight.rows),
                     static_cast<int>(x.cols),
                     static_cast<int>(x.rows),
                     0,
                     0,
                     0};
  const int64_t shared_bytes = ChooseTiles(grid, token_tiles, &args);
  const CudaLaunch launch = {stream, programmatic_launch};
  return WithKernel(x.dtype, y.dtype == DType::kF32, token_tiles, [&](auto kernel) {
    return LaunchKernel("launch of a product of few rows", kernel, grid, kThreads, shared_bytes,
                        launch, args);
  });
}

}  // namespace lockstep
