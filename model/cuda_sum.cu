// A block meets the blocks of its number on the other ranks, then takes rows in turn: reads each
// rank's part of a row, from its own memory or over NVLink, and norms it as cuda_norm.cu does. One-
// shot, a rank's blocks take all rows and write them to the rank itself; two-shot, they take the
// rows dealt to the rank, write them to all ranks, and meet the others again.
#include <algorithm>

#include "model/cuda_kernel.cuh"
#include "model/cuda_sum.h"

namespace lockstep {

namespace {

constexpr int kMaxSumThreads = 512;
constexpr int kMaxSumItems = 4;  // vectors of a thread

// Rows that a block has in work at once where it takes several: what its threads have asked for has
// to fill the links for as long as an answer takes. 400 GB/s * 1.5 us is 600 KB. On 2 ranks 128
// blocks of 448 threads have asked a peer for 900 KB with a row each, but for nothing while they
// add, meet and store. Bound by registers, 128 a thread: a vector of each rank for each row and
// item.
constexpr int RowsAtOnce(int items, int peers) { return std::max(1, 8 / (items * peers)); }

template <typename T>
struct SumArgs {
  PeerAddresses peers;
  int64_t parts_offset;  // bytes: from a rank's windows to its part of row 0
  // The rows that this rank sums: begin, begin + step, ... below end.
  int64_t begin, end;
  int step;
  // Out is the norm of those rows at their places, or where `wanted` is not null, of the rows that
  // it names closed up. `count`: of the rows, or of the names.
  const int32_t* wanted;
  int64_t count;
  int64_t cols;
  T* residual;
  int64_t residual_stride;
  bool replaces;  // the residual, instead of adding to it
  const float* weight;
  float eps;
  T* outs[kMaxPeers];  // every rank's, if it is written to
  int num_outs;
  int64_t out_stride;
  bool meets_again;
};

// Everything that this GPU wrote before, the kernels before this one included, is visible to who
// reads the counter.
__device__ __forceinline__ void StoreRelease(uint32_t* to, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}
__device__ __forceinline__ uint32_t LoadAcquire(const uint32_t* from) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}
__device__ __forceinline__ uint32_t LoadRelaxed(const uint32_t* from) {
  uint32_t value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}

// All threads of the block. Returns when every rank's block of this number has come to its meeting
// of number `meeting`, or the job is being aborted.
__device__ void MeetPeers(const PeerAddresses& peers, uint32_t meeting) {
  if (threadIdx.x < peers.size) {
    const int peer = static_cast<int>(threadIdx.x);
    StoreRelease(peers.arrivals[peer] + peers.rank * kMaxPeerBlocks + blockIdx.x, meeting);
    const uint32_t* arrival = peers.arrivals[peers.rank] + peer * kMaxPeerBlocks + blockIdx.x;
    // Numbers wrap around; peers are at most one meeting apart.
    for (uint32_t tries = 1; static_cast<int32_t>(LoadAcquire(arrival) - meeting) < 0; ++tries) {
      if (tries % 1024 == 0 && LoadRelaxed(peers.abort) != 0) break;
    }
  }
  __syncthreads();
}

// Number i of the rows to be summed; -1: there is none, or it is not this rank's.
template <typename T>
__device__ __forceinline__ int64_t RowOf(const SumArgs<T>& args, int64_t i) {
  if (i >= args.count) return -1;
  if (args.wanted == nullptr) return args.begin + i * args.step;
  const int64_t row = args.wanted[i];
  if (row < args.begin || row >= args.end) return -1;
  return static_cast<uint32_t>(row - args.begin) % static_cast<uint32_t>(args.step) == 0 ? row : -1;
}

// value: of the residual on entry, of the residual with the sum of the parts on return. Returns
// `squares` with its squares.
template <typename T, int kSize, int kPeers>
__device__ __forceinline__ float AddParts(const Vector<T, kSize> (&parts)[kPeers], int num_peers,
                                          bool replaces, Vector<T, kSize>& value, float squares) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    float sum = Widen(parts[0].at[i]);
#pragma unroll
    for (int peer = 1; peer < kPeers; ++peer) {
      if (peer < num_peers) sum += Widen(parts[peer].at[i]);
    }
    if (!replaces) sum += Widen(value.at[i]);
    value.at[i] = Narrow<T>(sum);
    squares = fmaf(Widen(value.at[i]), Widen(value.at[i]), squares);
  }
  return squares;
}

// kPeers: at least the number of ranks. kRows: what a block has in work at once; all loads of that
// are on their way together.
template <typename T, int kItems, int kPeers, int kRows>
__global__ void __launch_bounds__(kMaxSumThreads)
    SumNormKernel(const __grid_constant__ SumArgs<T> args) {
  constexpr int kSize = 16 / sizeof(T);
  __shared__ float warp_sums[2][kRows][kMaxSumThreads / 32];
  LetSuccessorStart();
  const int64_t stride = int64_t{blockDim.x} * kSize;
  const int64_t first = int64_t{threadIdx.x} * kSize;
  Vector<float, kSize> weights[kItems];
#pragma unroll
  for (int item = 0; item < kItems; ++item) {
    const int64_t col = first + item * stride;
    if (col < args.cols) weights[item] = LoadVector<kSize>(args.weight + col);
  }
  WaitForPredecessor();

  uint32_t meeting = args.peers.meetings[blockIdx.x];
  int64_t next = blockIdx.x;
  bool met = false;
  for (int turn = 0; !met || next < args.count; next += int64_t{kRows} * gridDim.x, turn ^= 1) {
    int64_t rows[kRows];
    Vector<T, kSize> kept[kRows][kItems] = {};
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      rows[j] = RowOf(args, next + j * int64_t{gridDim.x});
#pragma unroll
      for (int item = 0; item < kItems; ++item) {
        const int64_t col = first + item * stride;
        if (rows[j] < 0 || col >= args.cols || args.replaces) continue;
        kept[j][item] = LoadVector<kSize>(args.residual + rows[j] * args.residual_stride + col);
      }
    }
    if (!met) MeetPeers(args.peers, ++meeting);
    met = true;

    float sums[kRows] = {};  // of squares
#pragma unroll
    for (int item = 0; item < kItems; ++item) {
      const int64_t col = first + item * stride;
      if (col >= args.cols) continue;
      Vector<T, kSize> parts[kRows][kPeers];
#pragma unroll
      for (int j = 0; j < kRows; ++j) {
#pragma unroll
        for (int peer = 0; peer < kPeers; ++peer) {
          if (rows[j] < 0 || peer >= args.peers.size) continue;
          const char* part = args.peers.windows[peer] + args.parts_offset;
          parts[j][peer] =
              LoadVector<kSize>(reinterpret_cast<const T*>(part) + rows[j] * args.cols + col);
        }
      }
#pragma unroll
      for (int j = 0; j < kRows; ++j) {
        if (rows[j] < 0) continue;
        sums[j] = AddParts(parts[j], args.peers.size, args.replaces, kept[j][item], sums[j]);
      }
    }
    // Two buffers by turns: one is written again only behind the barrier of the rows between.
    BlockSums<kRows>(sums, warp_sums[turn]);
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      if (rows[j] < 0) continue;
      const float scale = 1.0f / sqrtf(sums[j] / static_cast<float>(args.cols) + args.eps);
#pragma unroll
      for (int item = 0; item < kItems; ++item) {
        const int64_t col = first + item * stride;
        if (col >= args.cols) continue;
        Vector<T, kSize>& value = kept[j][item];
        if (args.wanted == nullptr) {
          StoreVector(value, args.residual + rows[j] * args.residual_stride + col);
        }
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
          value.at[i] = Narrow<T>(Widen(value.at[i]) * scale * weights[item].at[i]);
        }
        const int64_t r = args.wanted == nullptr ? rows[j] : next + j * int64_t{gridDim.x};
        const int64_t at = r * args.out_stride + col;
#pragma unroll
        for (int out = 0; out < kPeers; ++out) {
          if (out < args.num_outs) StoreVector(value, args.outs[out] + at);
        }
      }
    }
  }
  if (args.meets_again) {
    // What all threads of the block have written goes with the arrival.
    __syncthreads();
    MeetPeers(args.peers, ++meeting);
  }
  if (threadIdx.x == 0) args.peers.meetings[blockIdx.x] = meeting;
}

template <typename T, int kItems, int kPeers>
auto KernelOf(bool several_rows) {
  return several_rows ? SumNormKernel<T, kItems, kPeers, RowsAtOnce(kItems, kPeers)>
                      : SumNormKernel<T, kItems, kPeers, 1>;
}

// num_rows: the most that a rank has to go through.
template <typename T, int kItems>
absl::Status LaunchSum(const SumArgs<T>& args, int64_t num_rows, int max_blocks,
                       const CudaContext& context) {
  constexpr int kSize = 16 / sizeof(T);
  const int64_t wanted = (args.cols / kSize + kItems - 1) / kItems;
  const int threads = static_cast<int>((wanted + 31) / 32 * 32);
  // As many on every rank, all at once on the GPU. Without rows, one that meets its peers: the
  // rules of the windows count on it.
  const int64_t grid = std::clamp<int64_t>(num_rows, 1, max_blocks);
  const bool several = num_rows > grid;
  const auto kernel = args.peers.size <= 2   ? KernelOf<T, kItems, 2>(several)
                      : args.peers.size <= 4 ? KernelOf<T, kItems, 4>(several)
                                             : KernelOf<T, kItems, kMaxPeers>(several);
  return LaunchKernel("launch of a sum over ranks", kernel, grid, threads, 0,
                      CudaLaunch{context.stream, context.programmatic_launch}, args);
}

// Bytes from this rank's windows to `data` in them.
int64_t OffsetInWindows(const PeerWindows& peers, const void* data) {
  return static_cast<const char*>(data) - static_cast<const char*>(peers.window(0));
}

void CheckSum(const PeerWindows& peers, const PeerSum& sum, const MatrixView& residual,
              const float* weight, const MatrixView& out) {
  LOCKSTEP_CHECK(SumAddRmsNormSupports(out.cols, out.dtype));
  LOCKSTEP_CHECK(residual.cols == out.cols && residual.dtype == out.dtype);
  LOCKSTEP_CHECK(sum.wanted != nullptr || residual.rows == out.rows);
  LOCKSTEP_CHECK(sum.rows.begin >= 0 && sum.rows.begin <= sum.rows.end &&
                 sum.rows.end <= residual.rows);
  LOCKSTEP_CHECK(RowsAligned16(residual) && RowsAligned16(out) && IsAligned16(weight));
  LOCKSTEP_CHECK(sum.window >= 0 && sum.window < PeerWindows::kNumWindows && sum.max_blocks > 0);
  const int64_t row_bytes = out.cols * SizeOf(out.dtype);
  LOCKSTEP_CHECK(sum.rows.end * row_bytes <= peers.window_bytes());
  LOCKSTEP_CHECK(sum.path != SumPath::kNccl);
  if (sum.path == SumPath::kOneShot) return;
  const int64_t offset = OffsetInWindows(peers, out.data);
  const int64_t window = sum.window * peers.window_bytes();
  LOCKSTEP_CHECK(out.stride == out.cols && offset >= 0);
  if (sum.wanted == nullptr) {
    LOCKSTEP_CHECK(offset == window);
  } else {
    const int64_t end = offset + out.rows * row_bytes;
    LOCKSTEP_CHECK(end <= PeerWindows::kNumWindows * peers.window_bytes());
    LOCKSTEP_CHECK(end <= window || offset >= window + peers.window_bytes());
  }
}

template <typename T>
SumArgs<T> ArgsOf(const PeerWindows& peers, const PeerSum& sum, const MatrixView& residual,
                  const float* weight, float eps, const MatrixView& out) {
  const PeerAddresses& addresses = peers.addresses();
  const bool two_shot = sum.path == SumPath::kTwoShot;
  const int step = two_shot ? addresses.size : 1;
  int64_t begin = sum.rows.begin;
  while (two_shot && RankOfSumRow(begin, step) != addresses.rank) ++begin;
  const int64_t own = std::max<int64_t>(0, sum.rows.end - begin + step - 1) / step;
  SumArgs<T> args = {.peers = addresses,
                     .parts_offset = sum.window * peers.window_bytes(),
                     .begin = begin,
                     .end = sum.rows.end,
                     .step = step,
                     .wanted = sum.wanted,
                     .count = sum.wanted == nullptr ? own : out.rows,
                     .cols = out.cols,
                     .residual = static_cast<T*>(residual.data),
                     .residual_stride = residual.stride,
                     .replaces = sum.use == ResidualUse::kReplace,
                     .weight = weight,
                     .eps = eps,
                     .outs = {static_cast<T*>(out.data)},
                     .num_outs = two_shot ? addresses.size : 1,
                     .out_stride = out.stride,
                     .meets_again = two_shot};
  if (!two_shot) return args;
  // Each rank begins with another.
  for (int i = 0; i < addresses.size; ++i) {
    const int peer = (addresses.rank + 1 + i) % addresses.size;
    args.outs[i] = reinterpret_cast<T*>(addresses.windows[peer] + OffsetInWindows(peers, out.data));
  }
  return args;
}

}  // namespace

bool SumAddRmsNormSupports(int64_t cols, DType dtype) {
  const int64_t bytes = cols * SizeOf(dtype);
  return cols > 0 && bytes % 16 == 0 && bytes / 16 <= kMaxSumThreads * kMaxSumItems;
}

absl::Status SumAddRmsNorm(const PeerWindows& peers, const PeerSum& sum, const MatrixView& residual,
                           const float* weight, float eps, const MatrixView& out,
                           const CudaContext& context) {
  CheckSum(peers, sum, residual, weight, out);
  // Of the rank that has most, so that all launch as many blocks.
  const int64_t ranks = sum.path == SumPath::kTwoShot ? peers.addresses().size : 1;
  const int64_t num_rows = sum.wanted != nullptr ? out.rows : (sum.rows.size() + ranks - 1) / ranks;
  const int max_blocks = std::min(sum.max_blocks, peers.max_blocks());
  return WithElementType(out.dtype, [&](auto element) {
    using T = decltype(element);
    const SumArgs<T> args = ArgsOf<T>(peers, sum, residual, weight, eps, out);
    const int64_t vectors = out.cols * SizeOf(out.dtype) / 16;
    if (vectors <= kMaxSumThreads) return LaunchSum<T, 1>(args, num_rows, max_blocks, context);
    if (vectors <= 2 * kMaxSumThreads) return LaunchSum<T, 2>(args, num_rows, max_blocks, context);
    return LaunchSum<T, 4>(args, num_rows, max_blocks, context);
  });
}

}  // namespace lockstep
