// A block meets the blocks of its number on the other ranks, then takes rows in turn: reads each
// rank's part of a row, from its own memory or over NVLink, and norms it as cuda_norm.cu does.
#include <algorithm>

#include "model/cuda_kernel.cuh"
#include "model/cuda_sum.h"

namespace lockstep {

namespace {

constexpr int kMaxSumThreads = 512;
constexpr int kMaxSumItems = 4;  // vectors of a thread

template <typename T>
struct SumArgs {
  PeerAddresses peers;
  int64_t window_offset;  // bytes
  int64_t num_rows;       // of out
  int64_t cols;
  const int32_t* rows;
  T* residual;
  int64_t residual_stride;
  bool replaces;  // the residual, instead of adding to it
  const float* weight;
  float eps;
  T* out;
  int64_t out_stride;
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

// All threads of the block. Returns when every rank's block of this number has come here as often
// as this one, or the job is being aborted.
__device__ void MeetPeers(const PeerAddresses& peers) {
  const uint32_t meeting = peers.meetings[blockIdx.x] + 1;
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
  if (threadIdx.x == 0) peers.meetings[blockIdx.x] = meeting;
}

// kPeers: at least the number of ranks; all their loads are on their way at once.
template <typename T, int kItems, int kPeers>
__global__ void __launch_bounds__(kMaxSumThreads)
    SumNormKernel(const __grid_constant__ SumArgs<T> args) {
  constexpr int kSize = 16 / sizeof(T);
  __shared__ float warp_sums[2][kMaxSumThreads / 32];
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

  bool met = false;
  int turn = 0;
  if (args.num_rows == 0) MeetPeers(args.peers);
  for (int64_t r = blockIdx.x; r < args.num_rows; r += gridDim.x, turn ^= 1) {
    const int64_t row = args.rows == nullptr ? r : args.rows[r];
    T* residual = args.residual + row * args.residual_stride;
    Vector<T, kSize> kept[kItems] = {};
#pragma unroll
    for (int item = 0; item < kItems; ++item) {
      const int64_t col = first + item * stride;
      if (col < args.cols && !args.replaces) kept[item] = LoadVector<kSize>(residual + col);
    }
    if (!met) MeetPeers(args.peers);
    met = true;

    float squares = 0;
#pragma unroll
    for (int item = 0; item < kItems; ++item) {
      const int64_t col = first + item * stride;
      if (col >= args.cols) continue;
      Vector<T, kSize> parts[kPeers];
#pragma unroll
      for (int peer = 0; peer < kPeers; ++peer) {
        if (peer >= args.peers.size) continue;
        const T* window = reinterpret_cast<const T*>(args.peers.windows[peer] + args.window_offset);
        parts[peer] = LoadVector<kSize>(window + row * args.cols + col);
      }
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        float sum = Widen(parts[0].at[i]);
#pragma unroll
        for (int peer = 1; peer < kPeers; ++peer) {
          if (peer < args.peers.size) sum += Widen(parts[peer].at[i]);
        }
        if (!args.replaces) sum += Widen(kept[item].at[i]);
        kept[item].at[i] = Narrow<T>(sum);
        squares = fmaf(Widen(kept[item].at[i]), Widen(kept[item].at[i]), squares);
      }
      if (args.rows == nullptr) StoreVector(kept[item], residual + col);
    }
    // Two buffers by turns: one is written again only behind the barrier of the row between.
    const float mean = BlockSum(squares, warp_sums[turn]) / static_cast<float>(args.cols);
    const float scale = 1.0f / sqrtf(mean + args.eps);
#pragma unroll
    for (int item = 0; item < kItems; ++item) {
      const int64_t col = first + item * stride;
      if (col >= args.cols) continue;
      Vector<T, kSize> result;
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        result.at[i] = Narrow<T>(Widen(kept[item].at[i]) * scale * weights[item].at[i]);
      }
      StoreVector(result, args.out + r * args.out_stride + col);
    }
  }
}

template <typename T, int kItems>
absl::Status LaunchSum(const SumArgs<T>& args, const CudaContext& context) {
  constexpr int kSize = 16 / sizeof(T);
  const int64_t wanted = (args.cols / kSize + kItems - 1) / kItems;
  const int threads = static_cast<int>((wanted + 31) / 32 * 32);
  // All blocks of a rank are on the GPU at once, and as many on every rank. Without rows, one that
  // meets its peers: the rules of the windows count on it.
  const int64_t grid = std::clamp<int64_t>(args.num_rows, 1, kMaxPeerBlocks);
  const auto kernel = args.peers.size <= 2   ? SumNormKernel<T, kItems, 2>
                      : args.peers.size <= 4 ? SumNormKernel<T, kItems, 4>
                                             : SumNormKernel<T, kItems, kMaxPeers>;
  return LaunchKernel("launch of a sum over ranks", kernel, grid, threads, 0,
                      CudaLaunch{context.stream, context.programmatic_launch}, args);
}

}  // namespace

bool SumAddRmsNormSupports(int64_t cols, DType dtype) {
  const int64_t bytes = cols * SizeOf(dtype);
  return cols > 0 && bytes % 16 == 0 && bytes / 16 <= kMaxSumThreads * kMaxSumItems;
}

absl::Status SumAddRmsNorm(const PeerWindows& peers, int window, ResidualUse use,
                           const MatrixView& residual, const int32_t* rows, const float* weight,
                           float eps, const MatrixView& out, const CudaContext& context) {
  LOCKSTEP_CHECK(SumAddRmsNormSupports(out.cols, out.dtype));
  LOCKSTEP_CHECK(residual.cols == out.cols && residual.dtype == out.dtype);
  LOCKSTEP_CHECK(rows != nullptr || residual.rows == out.rows);
  LOCKSTEP_CHECK(RowsAligned16(residual) && RowsAligned16(out) && IsAligned16(weight));
  LOCKSTEP_CHECK(window >= 0 && window < PeerWindows::kNumWindows);
  LOCKSTEP_CHECK(residual.rows * residual.cols * SizeOf(residual.dtype) <= peers.window_bytes());
  LOCKSTEP_CHECK(context.num_multiprocessors >= kMaxPeerBlocks ||
                 out.rows <= context.num_multiprocessors);
  return WithElementType(out.dtype, [&](auto element) {
    using T = decltype(element);
    const SumArgs<T> args = {peers.addresses(),
                             window * peers.window_bytes(),
                             out.rows,
                             out.cols,
                             rows,
                             static_cast<T*>(residual.data),
                             residual.stride,
                             use == ResidualUse::kReplace,
                             weight,
                             eps,
                             static_cast<T*>(out.data),
                             out.stride};
    const int64_t vectors = out.cols * SizeOf(out.dtype) / 16;
    if (vectors <= kMaxSumThreads) return LaunchSum<T, 1>(args, context);
    if (vectors <= 2 * kMaxSumThreads) return LaunchSum<T, 2>(args, context);
    return LaunchSum<T, 4>(args, context);
  });
}

}  // namespace lockstep
