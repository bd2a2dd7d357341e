// y = W * x for one x. Bound by the read of W, so everything serves that read:
//
// - A block a multiprocessor owns a contiguous share of the outputs. One thread, the producer,
// pulls
//   the share's rows of W through a ring of stages in shared memory with bulk copies of whole rows,
//   some 100 KB of them on their way. The ring takes less than half of a multiprocessor's shared
//   memory: with programmatic launches the next kernel's block stands beside this one and fills its
//   ring while this one drains. Only W, which never changes, is read before the kernel before has
//   ended.
// - Up to 15 warps consume: `column_warps` share the columns, each with its part of x in registers,
//   times `row_warps` that share a stage's rows. A lane has 8 columns of every 256 ("chunk").
// - The warps' parts of a sum meet in shared memory, some tens of rows at a time, in two buffers by
//   turns: who writes one has met all others since it was read.
//
// Floor: bytes of W over memory bandwidth.
#include <algorithm>
#include <limits>
#include <optional>

#include "model/cuda_async_copy.cuh"
#include "model/cuda_gemv.h"
#include "model/cuda_kernel.cuh"

namespace lockstep {

namespace {

constexpr int kMaxWarps = 15;  // that consume; with the producer's: two blocks of 64 registers fit
constexpr int kMaxThreads = (kMaxWarps + 1) * 32;
constexpr int kChunkCols = 256;
constexpr int kMaxChunks = 8;  // of a warp
constexpr int kMaxRowWarps = 4;
constexpr int kMaxStages = 16;
// Rows of W whose parts are collected before they are added up.
constexpr int kGroupRows = 64;
constexpr int kPartStride = kMaxWarps + 2;  // odd: rows behind each other start in other banks
// Two blocks fit at 113 KB each; the parts take 9 KB.
constexpr int kRingBytes = 102400;
// Rows so long that two stages need more than that leave no room for a second block.
constexpr int kMaxRingBytes = 215 * 1024;

struct GemvArgs {
  const void* x;
  const float* norm_weight;
  float norm_eps;
  const char* weight;
  int64_t up_bytes;  // from a gate row to its up row; 0: there is none
  const void* bias;
  void* y;
  int k;
  int num_outputs;
  bool adds;        // to y
  bool stores_f32;  // y is float32
  int column_warps;
  int row_warps;
  int stage_rows;
  int num_stages;
};

// A block's shared memory, and its share.
struct Ring {
  const GemvArgs& args;
  char* stages;
  uint64_t* full;   // copies have landed
  uint64_t* empty;  // every consumer warp is done
  int first_output;
  int num_outputs;

  __device__ int rows_per_output() const { return args.up_bytes == 0 ? 1 : 2; }
  __device__ int row_bytes() const { return args.k * 2; }
  __device__ int num_rows() const { return num_outputs * rows_per_output(); }
  __device__ int num_steps() const { return (num_rows() + args.stage_rows - 1) / args.stage_rows; }
  __device__ char* Stage(int stage) const { return stages + stage * args.stage_rows * row_bytes(); }
};

// A stage holds rows of W in order or, with gates, the gate rows of some outputs, then their up
// rows. One thread.
__device__ void Produce(const Ring& ring) {
  const GemvArgs& args = ring.args;
  const int stage_outputs = args.stage_rows / ring.rows_per_output();
  const int steps = ring.num_steps();
  for (int step = 0; step < steps; ++step) {
    const int stage = step % args.num_stages;
    if (step >= args.num_stages) Wait(ring.empty + stage, (step / args.num_stages - 1) & 1);
    const int output = step * stage_outputs;
    const int bytes = min(stage_outputs, ring.num_outputs - output) * ring.row_bytes();
    const char* from = args.weight + int64_t{ring.first_output + output} * ring.row_bytes();
    ArriveExpecting(ring.full + stage, bytes * ring.rows_per_output());
    CopyBytes(ring.Stage(stage), from, bytes, ring.full + stage);
    if (args.up_bytes != 0) {
      CopyBytes(ring.Stage(stage) + bytes, from + args.up_bytes, bytes, ring.full + stage);
    }
  }
  // Not before: blocks of the next kernel that wait for a place meet multiprocessors that become
  // free early, and two of them on one read half as fast.
  LetSuccessorStart();
}

__device__ __forceinline__ void ConsumersMeet(int threads) {
  asm volatile("bar.sync 1, %0;" ::"r"(threads) : "memory");
}

// A warp's place among the consumers.
struct Consumer {
  int column_warp;
  int row_warp;
  int lane;
  int threads;  // of all consumers

  __device__ explicit Consumer(const GemvArgs& args)
      : column_warp(threadIdx.x / 32 % args.column_warps),
        row_warp(threadIdx.x / 32 / args.column_warps),
        lane(threadIdx.x % 32),
        threads(args.column_warps * args.row_warps * 32) {}
  // First of this lane's columns in its i-th chunk.
  __device__ int Column(const GemvArgs& args, int i) const {
    return (column_warp + args.column_warps * i) * kChunkCols + lane * 8;
  }
};

// This lane's columns of x; zeros beyond K.
template <typename T, int kChunks>
struct XPart {
  Vector<T, 8> at[kChunks];

  // Where registers are scarce, x stays in 16 bits: the compiler may not widen it once for all
  // rows.
  __device__ __forceinline__ void StayNarrow() {
    if constexpr (kChunks > 2) {
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        auto* words = reinterpret_cast<uint32_t*>(at[i].at);
        asm volatile("" : "+r"(words[0]), "+r"(words[1]), "+r"(words[2]), "+r"(words[3]));
      }
    }
  }
};

template <typename T, int kChunks>
__device__ __forceinline__ void LoadX(const GemvArgs& args, const Consumer& me,
                                      XPart<T, kChunks>& x) {
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    const int col = me.Column(args, i);
    uint4 bits = {};
    // From L2: another block of this multiprocessor may have read what stood there before.
    if (col < args.k) {
      bits = __ldcg(reinterpret_cast<const uint4*>(static_cast<const T*>(args.x) + col));
    }
    x.at[i] = *reinterpret_cast<const Vector<T, 8>*>(&bits);
  }
}

// Sum of the column warps' parts. All are read at once: those that are not there hold anything.
__device__ __forceinline__ float SumParts(const GemvArgs& args, const float* parts) {
  float sum = 0;
#pragma unroll
  for (int w = 0; w < kMaxWarps; ++w) {
    const float part = parts[w];
    if (w < args.column_warps) sum += part;
  }
  return sum;
}

// RmsNorm(x). Every block makes it for itself. `squares`: shared, [kMaxWarps].
template <typename T, int kChunks>
__device__ __forceinline__ void LoadNormedX(const GemvArgs& args, const Consumer& me,
                                            float* squares, XPart<T, kChunks>& x) {
  // The weights are asked for before x, where there are registers for them: they wait for nobody.
  constexpr bool kAhead = kChunks <= 3;
  XPart<float, kAhead ? kChunks : 1> ahead;
  if constexpr (kAhead) {
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const int col = me.Column(args, i);
      if (col < args.k) ahead.at[i] = LoadVector<8>(args.norm_weight + col);
    }
  }
  WaitForPredecessor();
  LoadX(args, me, x);
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
#pragma unroll
    for (int j = 0; j < 8; ++j) sum = fmaf(Widen(x.at[i].at[j]), Widen(x.at[i].at[j]), sum);
  }
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
  if (me.row_warp == 0 && me.lane == 0) squares[me.column_warp] = sum;
  ConsumersMeet(me.threads);
  const float mean = SumParts(args, squares) / static_cast<float>(args.k);
  const float scale = 1.0f / sqrtf(mean + args.norm_eps);
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    const int col = me.Column(args, i);
    if (col >= args.k) continue;
    Vector<float, 8> weight;
    if constexpr (kAhead) {
      weight = ahead.at[i];
    } else {
      weight = LoadVector<8>(args.norm_weight + col);
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      x.at[i].at[j] = Narrow<T>(Widen(x.at[i].at[j]) * scale * weight.at[j]);
    }
  }
}

// This lane's part of the product of a row of W, in shared memory.
template <typename T, int kChunks>
__device__ __forceinline__ float MultiplyRow(const GemvArgs& args, const Consumer& me,
                                             const char* row, const XPart<T, kChunks>& x) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    const int col = me.Column(args, i);
    // Columns beyond K are the next row's, or nobody's.
    uint4 bits = {};
    if (col < args.k) bits = *reinterpret_cast<const uint4*>(row + col * 2);
    const auto& w = *reinterpret_cast<const Vector<T, 8>*>(&bits);
#pragma unroll
    for (int j = 0; j < 8; ++j) sum = fmaf(Widen(w.at[j]), Widen(x.at[i].at[j]), sum);
  }
  return sum;
}

// Sums over the warp of one or two values; lane 0 gets that of the first, lane 16 that of the
// second.
__device__ __forceinline__ float WarpSums(const float (&values)[1]) {
  float sum = values[0];
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
  return sum;
}
__device__ __forceinline__ float WarpSums(const float (&values)[2]) {
  const bool second = threadIdx.x % 32 >= 16;
  float sum = second ? values[1] : values[0];
  sum += __shfl_xor_sync(~0u, second ? values[0] : values[1], 16);
#pragma unroll
  for (int lanes = 8; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
  return sum;
}

template <typename T>
__device__ __forceinline__ float BiasOf(const GemvArgs& args, int64_t row) {
  if (args.bias == nullptr) return 0;
  return args.stores_f32 ? static_cast<const float*>(args.bias)[row]
                         : Widen(static_cast<const T*>(args.bias)[row]);
}

// Of the rows [first_row, first_row + num_rows) of the block's share, in the order of the stages.
template <typename T>
__device__ void FinishGroup(const Ring& ring, const float* parts, int first_row, int num_rows) {
  const GemvArgs& args = ring.args;
  const int per_output = ring.rows_per_output();
  const int i = static_cast<int>(threadIdx.x);
  if (i >= num_rows / per_output) return;
  const int64_t output = ring.first_output + first_row / per_output + i;
  if (per_output == 2) {
    // The outputs' rows within their stage, the last of which may be shorter.
    const int stage_outputs = args.stage_rows / 2;
    const int begin = i / stage_outputs * stage_outputs;
    const int size = min(stage_outputs, num_rows / 2 - begin);
    const int gate_row = 2 * begin + i % stage_outputs;
    const float gate = SumParts(args, parts + gate_row * kPartStride) + BiasOf<T>(args, output);
    const float up = SumParts(args, parts + (gate_row + size) * kPartStride) +
                     BiasOf<T>(args, output + args.num_outputs);
    static_cast<T*>(args.y)[output] = Narrow<T>(gate / (1.0f + expf(-gate)) * up);
    return;
  }
  const float sum = SumParts(args, parts + i * kPartStride) + BiasOf<T>(args, output);
  if (args.stores_f32) {
    static_cast<float*>(args.y)[output] = sum;
  } else {
    T* const y = static_cast<T*>(args.y) + output;
    *y = Narrow<T>(args.adds ? Widen(__ldcg(y)) + sum : sum);
  }
}

// parts: two buffers of [kGroupRows, kPartStride].
template <typename T, int kChunks, int kRows>
__device__ void Consume(const Ring& ring, float* parts, float* squares) {
  const GemvArgs& args = ring.args;
  const Consumer me(args);
  XPart<T, kChunks> x;
  if (args.norm_weight == nullptr) {
    WaitForPredecessor();
    LoadX(args, me, x);
  } else {
    LoadNormedX(args, me, squares, x);
  }

  const int num_rows = ring.num_rows(), steps = ring.num_steps();
  const int group_steps = kGroupRows / args.stage_rows;
  for (int step = 0, group = 0; step < steps; ++group) {
    float* const buffer = parts + group % 2 * kGroupRows * kPartStride;
    const int first_row = step * args.stage_rows;
    const int end_step = min(step + group_steps, steps);
    for (; step < end_step; ++step) {
      const int stage = step % args.num_stages;
      Wait(ring.full + stage, (step / args.num_stages) & 1);
      x.StayNarrow();
      float sums[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const char* row = ring.Stage(stage) + (me.row_warp * kRows + r) * ring.row_bytes();
        sums[r] = MultiplyRow(args, me, row, x);
      }
      const float sum = WarpSums(sums);
      const int r = me.row_warp * kRows + (kRows == 2 ? me.lane / 16 : 0);
      const int row = step * args.stage_rows - first_row + r;
      // Rows that the last stage does not have are somebody's, and go nowhere: the group ends
      // before them.
      if (me.lane == 0 || (kRows == 2 && me.lane == 16)) {
        buffer[row * kPartStride + me.column_warp] = sum;
      }
      __syncwarp();
      if (me.lane == 0) Arrive(ring.empty + stage);
    }
    ConsumersMeet(me.threads);
    FinishGroup<T>(ring, buffer, first_row, min(end_step * args.stage_rows, num_rows) - first_row);
  }
}

template <typename T, int kChunks, int kRows>
__global__ void __launch_bounds__(kMaxThreads, 2)
    GemvKernel(const __grid_constant__ GemvArgs args) {
  extern __shared__ __align__(128) char stages[];
  __shared__ uint64_t full[kMaxStages], empty[kMaxStages];
  __shared__ float parts[2 * kGroupRows * kPartStride];
  __shared__ float squares[kMaxWarps];
  const int first = static_cast<int>(int64_t{args.num_outputs} * blockIdx.x / gridDim.x);
  const int end = static_cast<int>(int64_t{args.num_outputs} * (blockIdx.x + 1) / gridDim.x);
  const Ring ring = {args, stages, full, empty, first, end - first};
  const int consumers = args.column_warps * args.row_warps;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < args.num_stages; ++stage) {
      InitBarrier(full + stage, 1);
      InitBarrier(empty + stage, consumers);
    }
    PublishBarriers();
  }
  __syncthreads();
  if (static_cast<int>(threadIdx.x) / 32 == consumers) {
    if (threadIdx.x % 32 == 0) Produce(ring);
  } else {
    Consume<T, kChunks, kRows>(ring, parts, squares);
  }
}

// How the warps share a product.
struct Sharing {
  int chunks = 0;         // of a warp
  int rows_per_warp = 0;  // of a stage
  int64_t ring_bytes = 0;
};

// Nothing when K is too long.
std::optional<Sharing> ChooseSharing(GemvArgs* args) {
  Sharing sharing;
  const int all_chunks = (args->k + kChunkCols - 1) / kChunkCols;
  sharing.chunks = (all_chunks + kMaxWarps - 1) / kMaxWarps;
  if (sharing.chunks > kMaxChunks) return std::nullopt;
  args->column_warps = (all_chunks + sharing.chunks - 1) / sharing.chunks;
  args->row_warps = std::min(kMaxWarps / args->column_warps, kMaxRowWarps);
  // Two rows at a time have more of a warp's latency overlap; long rows come one by one, in more
  // stages. A stage with gates has pairs.
  const int64_t two_rows = int64_t{args->row_warps} * 2 * args->k * 2;
  const bool needs_pairs = args->up_bytes != 0 && args->row_warps % 2 != 0;
  sharing.rows_per_warp = needs_pairs || two_rows * 3 <= kRingBytes ? 2 : 1;
  args->stage_rows = args->row_warps * sharing.rows_per_warp;
  const int64_t stage_bytes = int64_t{args->stage_rows} * args->k * 2;
  args->num_stages = static_cast<int>(std::clamp<int64_t>(kRingBytes / stage_bytes, 2, kMaxStages));
  sharing.ring_bytes = args->num_stages * stage_bytes;
  if (sharing.ring_bytes > kMaxRingBytes) return std::nullopt;
  return sharing;
}

// fn(kernel) of this type and sharing.
template <typename Fn>
absl::Status WithKernel(DType dtype, int chunks, int rows_per_warp, const Fn& fn) {
  const auto with_chunks = [&]<typename T, int kChunks>() {
    return rows_per_warp == 2 ? fn(GemvKernel<T, kChunks, 2>) : fn(GemvKernel<T, kChunks, 1>);
  };
  const auto with_type = [&]<typename T>() {
    switch (chunks) {
      case 1:
        return with_chunks.template operator()<T, 1>();
      case 2:
        return with_chunks.template operator()<T, 2>();
      case 3:
        return with_chunks.template operator()<T, 3>();
      case 4:
        return with_chunks.template operator()<T, 4>();
      case 5:
        return with_chunks.template operator()<T, 5>();
      case 6:
        return with_chunks.template operator()<T, 6>();
      default:
        return with_chunks.template operator()<T, kMaxChunks>();
    }
  };
  return dtype == DType::kBF16 ? with_type.template operator()<__nv_bfloat16>()
                               : with_type.template operator()<__half>();
}

GemvArgs MakeArgs(const GemvOperands& operands) {
  const bool swiglu = operands.output == GemvOutput::kSwiGlu;
  GemvArgs args = {};
  args.x = operands.x.data;
  args.norm_weight = operands.norm_weight;
  args.norm_eps = operands.norm_eps;
  args.weight = static_cast<const char*>(operands.weight.data);
  args.bias = operands.bias;
  args.y = operands.y.data;
  args.k = static_cast<int>(operands.x.cols);
  args.num_outputs = static_cast<int>(operands.y.cols);
  args.up_bytes = swiglu ? operands.y.cols * operands.x.cols * 2 : 0;
  args.adds = operands.output == GemvOutput::kAdd;
  args.stores_f32 = operands.y.dtype == DType::kF32;
  return args;
}

}  // namespace

absl::StatusOr<Gemv> Gemv::Create(int num_multiprocessors) {
  LOCKSTEP_CHECK(num_multiprocessors > 0);
  Gemv gemv;
  gemv.num_multiprocessors_ = num_multiprocessors;
  // The carveout, too: a multiprocessor that had to change it could not begin one kernel while it
  // ends another.
  const auto allow = [](auto kernel) {
    const absl::Status status = CudaStatus(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMaxRingBytes),
        "shared memory of a product");
    if (!status.ok()) return status;
    return CudaStatus(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                           cudaSharedmemCarveoutMaxShared),
                      "shared memory of a product");
  };
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    for (int chunks = 1; chunks <= kMaxChunks; ++chunks) {
      for (const int rows : {1, 2}) {
        LOCKSTEP_RETURN_IF_ERROR(WithKernel(dtype, chunks, rows, allow));
      }
    }
  }
  return gemv;
}

bool Gemv::Supports(const GemvOperands& operands) {
  constexpr int64_t kMaxInt = std::numeric_limits<int>::max();
  const MatrixView &x = operands.x, &weight = operands.weight, &y = operands.y;
  if ((x.dtype != DType::kBF16 && x.dtype != DType::kF16) || weight.dtype != x.dtype) return false;
  if (y.dtype != x.dtype && (y.dtype != DType::kF32 || operands.output != GemvOutput::kStore)) {
    return false;
  }
  if (x.rows != 1 || x.cols <= 0 || x.cols % 8 != 0 || x.cols > kMaxInt / 4) return false;
  if (weight.stride != weight.cols || weight.rows <= 0 || weight.rows > kMaxInt) return false;
  if (!IsAligned16(x.data) || !IsAligned16(weight.data) || !IsAligned16(operands.norm_weight)) {
    return false;
  }
  GemvArgs args = MakeArgs(operands);
  return ChooseSharing(&args).has_value();
}

absl::Status Gemv::Run(const GemvOperands& operands, CudaStream stream,
                       bool programmatic_launch) const {
  LOCKSTEP_CHECK(Supports(operands));
  LOCKSTEP_CHECK(operands.y.rows == 1 && operands.x.cols == operands.weight.cols);
  LOCKSTEP_CHECK(operands.weight.rows ==
                 operands.y.cols * (operands.output == GemvOutput::kSwiGlu ? 2 : 1));
  GemvArgs args = MakeArgs(operands);
  const Sharing sharing = *ChooseSharing(&args);
  const int grid = std::min(num_multiprocessors_, args.num_outputs);
  const int threads = (args.column_warps * args.row_warps + 1) * 32;
  const CudaLaunch launch = {stream, programmatic_launch};
  return WithKernel(operands.x.dtype, sharing.chunks, sharing.rows_per_warp, [&](auto kernel) {
    return LaunchKernel("launch of a product of one row", kernel, grid, threads, sharing.ring_bytes,
                        launch, args);
  });
}

}  // namespace lockstep
