#include <algorithm>

#include "model/checkpoint/dummy_values.h"
#include "model/cuda_kernel.cuh"
#include "model/cuda_weight_ops.h"

namespace lockstep {

namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxBlocks = 4096;  // several rounds of the largest GPU; each thread loops

int64_t Blocks(int64_t items) {
  return std::clamp<int64_t>((items + kThreads - 1) / kThreads, 1, kMaxBlocks);
}

// An item is kSize neighbouring elements of a row; cols % kSize == 0, and out is aligned to them.
template <typename T, int kSize>
__global__ void __launch_bounds__(kThreads)
    MakeUpKernel(MadeUpTensor tensor, int64_t first_row, int64_t first_col, int64_t rows,
                 int64_t cols, T* out) {
  WaitForPredecessor();
  const int64_t items_a_row = cols / kSize;
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t item = int64_t{blockIdx.x} * kThreads + threadIdx.x; item < rows * items_a_row;
       item += step) {
    const int64_t row = item / items_a_row;
    const int64_t col = item % items_a_row * kSize;
    const uint32_t row_key = DummyRowKey(tensor.key, first_row + row);
    Vector<T, kSize> values;
    for (int i = 0; i < kSize; ++i) {
      const uint32_t at = static_cast<uint32_t>(first_col + col + i);
      values.at[i] = Narrow<T>(tensor.is_norm ? 1.0f : DummyValue(row_key, at));
    }
    StoreVector<kSize>(values, out + row * cols + col);
  }
}

// count % kSize == 0, and both are aligned to as many elements.
template <typename From, typename To, int kSize>
__global__ void __launch_bounds__(kThreads)
    ConvertKernel(const From* __restrict__ from, To* __restrict__ to, int64_t count) {
  WaitForPredecessor();
  const int64_t step = int64_t{gridDim.x} * kThreads * kSize;
  for (int64_t i = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kSize; i < count; i += step) {
    const Vector<From, kSize> source = LoadVector<kSize>(from + i);
    Vector<To, kSize> result;
    for (int j = 0; j < kSize; ++j) result.at[j] = Narrow<To>(Widen(source.at[j]));
    StoreVector<kSize>(result, to + i);
  }
}

}  // namespace

absl::Status MakeUpWeights(const MadeUpTensor& tensor, Range rows, Range cols,
                           const MatrixView& out, CudaStream stream) {
  LOCKSTEP_CHECK(out.rows == rows.size() && out.cols == cols.size() && out.stride == out.cols);
  if (out.rows == 0 || out.cols == 0) return absl::OkStatus();
  return WithElementType(out.dtype, [&](auto element) {
    using T = decltype(element);
    constexpr int kSize = 8;
    T* const to = static_cast<T*>(out.data);
    const bool wide = out.cols % kSize == 0 && IsAligned16(out.data);
    const auto kernel = wide ? MakeUpKernel<T, kSize> : MakeUpKernel<T, 1>;
    return LaunchKernel("making up weights", kernel,
                        Blocks(out.rows * out.cols / (wide ? kSize : 1)), kThreads, 0,
                        {stream, false}, tensor, rows.begin, cols.begin, out.rows, out.cols, to);
  });
}

absl::Status ConvertOnCuda(DType from_type, const void* from, DType to_type, void* to,
                           int64_t count, CudaStream stream) {
  if (count == 0) return absl::OkStatus();
  return WithElementType(from_type, [&](auto source) {
    return WithElementType(to_type, [&](auto result) {
      using From = decltype(source);
      using To = decltype(result);
      constexpr int kSize = 8;
      const bool wide = count % kSize == 0 && IsAligned16(from) && IsAligned16(to);
      const auto kernel = wide ? ConvertKernel<From, To, kSize> : ConvertKernel<From, To, 1>;
      return LaunchKernel("conversion of weights", kernel, Blocks(count / (wide ? kSize : 1)),
                          kThreads, 0, {stream, false}, static_cast<const From*>(from),
                          static_cast<To*>(to), count);
    });
  });
}

}  // namespace lockstep
