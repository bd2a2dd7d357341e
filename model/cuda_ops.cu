#include <algorithm>

#include "model/cuda_kernel.cuh"
#include "model/cuda_ops.h"

namespace lockstep {

namespace {

constexpr int kThreads = 256;

CudaLaunch LaunchOf(const CudaContext& context) {
  return {context.stream, context.programmatic_launch};
}

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// --- Rows by index ---------------------------------------------------------------------------

// Rows of `words` words each; strides in words.
template <typename Word>
struct SelectArgs {
  const Word* from;
  int64_t from_stride;
  const int32_t* ids;
  int64_t first_id;  // row 0 of `from`
  int64_t num_ids;   // rows of `from`: others give zeros
  Word* out;
  int64_t out_stride;
  int64_t words;
};

// A block a row of out.
template <typename Word>
__global__ void __launch_bounds__(kThreads) SelectRowsKernel(const SelectArgs<Word> args) {
  LetSuccessorStart();
  WaitForPredecessor();
  const int64_t row = args.ids[blockIdx.x] - args.first_id;
  const bool known = row >= 0 && row < args.num_ids;
  const Word* from = args.from + (known ? row * args.from_stride : 0);
  Word* out = args.out + int64_t{blockIdx.x} * args.out_stride;
  for (int64_t i = threadIdx.x; i < args.words; i += blockDim.x) {
    out[i] = known ? from[i] : Word{};
  }
}

template <typename Word>
absl::Status LaunchSelect(const MatrixView& from, const int32_t* ids, int64_t first_id,
                          const MatrixView& out, const CudaLaunch& launch) {
  const int64_t element = SizeOf(out.dtype);
  const auto words = [&](int64_t elements) {
    return elements * element / static_cast<int64_t>(sizeof(Word));
  };
  const SelectArgs<Word> args = {static_cast<const Word*>(from.data),
                                 words(from.stride),
                                 ids,
                                 first_id,
                                 from.rows,
                                 static_cast<Word*>(out.data),
                                 words(out.stride),
                                 words(out.cols)};
  const int threads = static_cast<int>(std::min<int64_t>(kThreads, CeilDiv(args.words, 32) * 32));
  return LaunchKernel("launch of a gather of rows", SelectRowsKernel<Word>, out.rows, threads, 0,
                      launch, args);
}

absl::Status SelectRows(const MatrixView& from, const int32_t* ids, int64_t first_id,
                        const MatrixView& out, const CudaContext& context) {
  LOCKSTEP_CHECK(from.dtype == out.dtype && from.cols == out.cols);
  if (out.rows == 0 || out.cols == 0) return absl::OkStatus();
  const CudaLaunch launch = LaunchOf(context);
  const int64_t element = SizeOf(out.dtype);
  if (RowsAligned16(from) && RowsAligned16(out) && out.cols * element % 16 == 0) {
    return LaunchSelect<uint4>(from, ids, first_id, out, launch);
  }
  return element == 4 ? LaunchSelect<uint32_t>(from, ids, first_id, out, launch)
                      : LaunchSelect<uint16_t>(from, ids, first_id, out, launch);
}

// --- Elementwise -------------------------------------------------------------------------------

// Blocks cover rows of `cols` columns, `blocks_per_row` each.
template <int kSize>
struct RowTiling {
  explicit RowTiling(int64_t cols)
      : blocks_per_row(static_cast<int>(CeilDiv(cols, int64_t{kThreads} * kSize))) {}
  __device__ int64_t row() const { return blockIdx.x / blocks_per_row; }
  __device__ int64_t col() const {
    return (int64_t{blockIdx.x % blocks_per_row} * kThreads + threadIdx.x) * kSize;
  }
  unsigned blocks_per_row;
};

template <typename T, int kSize>
__global__ void __launch_bounds__(kThreads)
    SiluMulKernel(const T* gate_up, int64_t gate_up_stride, T* out, int64_t out_stride,
                  int64_t cols, RowTiling<kSize> tiling) {
  LetSuccessorStart();
  WaitForPredecessor();
  const int64_t col = tiling.col();
  if (col >= cols) return;
  const T* row = gate_up + tiling.row() * gate_up_stride;
  const Vector<T, kSize> gates = LoadVector<kSize>(row + col);
  const Vector<T, kSize> ups = LoadVector<kSize>(row + cols + col);
  Vector<T, kSize> result;
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    const float gate = Widen(gates.at[i]);
    result.at[i] = Narrow<T>(gate / (1.0f + expf(-gate)) * Widen(ups.at[i]));
  }
  StoreVector(result, out + tiling.row() * out_stride + col);
}

}  // namespace

absl::Status GatherRows(const int32_t* ids, Range vocab, const MatrixView& table,
                        const MatrixView& out, const CudaContext& context) {
  LOCKSTEP_CHECK(table.rows == vocab.size());
  return SelectRows(table, ids, vocab.begin, out, context);
}

absl::Status SiluMul(const MatrixView& gate_up, const MatrixView& out, const CudaContext& context) {
  LOCKSTEP_CHECK(gate_up.cols == 2 * out.cols && gate_up.rows == out.rows);
  LOCKSTEP_CHECK(gate_up.dtype == out.dtype);
  if (out.rows == 0 || out.cols == 0) return absl::OkStatus();
  return WithElementType(out.dtype, [&](auto element) {
    using T = decltype(element);
    const auto run = [&](auto size) {
      constexpr int kSize = decltype(size)::value;
      const RowTiling<kSize> tiling(out.cols);
      return LaunchKernel("launch of SiLU", SiluMulKernel<T, kSize>,
                          out.rows * tiling.blocks_per_row, kThreads, 0, LaunchOf(context),
                          static_cast<const T*>(gate_up.data), gate_up.stride,
                          static_cast<T*>(out.data), out.stride, out.cols, tiling);
    };
    constexpr int kSize = 16 / sizeof(T);
    const bool aligned = RowsAligned16(gate_up) && RowsAligned16(out) && out.cols % kSize == 0;
    return aligned ? run(std::integral_constant<int, kSize>())
                   : run(std::integral_constant<int, 1>());
  });
}

}  // namespace lockstep
