// RMSNorm of rows, alone and with the residual addition before it.
#include "model/cuda_kernel.cuh"
#include "model/cuda_ops.h"

namespace lockstep {

namespace {

constexpr int kMaxNormThreads = 512;

template <typename T>
struct NormArgs {
  const T* x;
  int64_t x_stride;
  const T* delta;  // null: nothing to add
  int64_t delta_stride;
  const int32_t* rows;  // of x and delta for each row of out; null: the same
  T* sum;               // x + delta goes here; null: nowhere. Strides and rows of x
  const float* weight;
  float eps;
  T* out;
  int64_t out_stride;
  int64_t cols;
};

// x (+ delta), each sum rounded to T as it is stored.
template <typename T, int kSize>
__device__ __forceinline__ Vector<T, kSize> LoadSum(const T* x, const T* delta) {
  Vector<T, kSize> sum = LoadVector<kSize>(x);
  if (delta == nullptr) return sum;
  const Vector<T, kSize> addend = LoadVector<kSize>(delta);
#pragma unroll
  for (int i = 0; i < kSize; ++i) sum.at[i] = Narrow<T>(Widen(sum.at[i]) + Widen(addend.at[i]));
  return sum;
}

template <typename T, int kSize>
__device__ __forceinline__ float SumOfSquares(const Vector<T, kSize>& values) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kSize; ++i) sum = fmaf(Widen(values.at[i]), Widen(values.at[i]), sum);
  return sum;
}

template <typename T, int kSize>
__device__ __forceinline__ Vector<T, kSize> Scaled(const Vector<T, kSize>& values, float scale,
                                                   const Vector<float, kSize>& weight) {
  Vector<T, kSize> result;
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    result.at[i] = Narrow<T>(Widen(values.at[i]) * scale * weight.at[i]);
  }
  return result;
}

// A block a row of out. Thread i owns vectors i, i + blockDim.x, ... of the row, so that nobody
// reads what another thread writes. With kItems > 0 a thread has at most so many, keeps them in
// registers, and has asked for their weights, which come from far, before the rows are there; with
// 0 it reads them twice.
template <typename T, int kSize, int kItems>
__global__ void __launch_bounds__(kMaxNormThreads) NormKernel(const NormArgs<T> args) {
  __shared__ float warp_sums[kMaxNormThreads / 32];
  LetSuccessorStart();
  constexpr int kKept = kItems > 0 ? kItems : 1;
  const int64_t stride = int64_t{blockDim.x} * kSize;
  const int64_t first = int64_t{threadIdx.x} * kSize;
  Vector<float, kSize> weights[kKept];
  if constexpr (kItems > 0) {
#pragma unroll
    for (int item = 0; item < kItems; ++item) {
      const int64_t col = first + item * stride;
      if (col < args.cols) weights[item] = LoadVector<kSize>(args.weight + col);
    }
  }
  WaitForPredecessor();

  const int64_t row = args.rows == nullptr ? int64_t{blockIdx.x} : args.rows[blockIdx.x];
  const T* x = args.x + row * args.x_stride;
  const T* delta = args.delta == nullptr ? nullptr : args.delta + row * args.delta_stride;
  T* sum = args.sum == nullptr ? nullptr : args.sum + row * args.x_stride;
  T* out = args.out + int64_t{blockIdx.x} * args.out_stride;
  const auto load = [&](int64_t col) {
    return LoadSum<T, kSize>(x + col, delta == nullptr ? nullptr : delta + col);
  };

  Vector<T, kSize> kept[kKept];
  float squares = 0;
  if constexpr (kItems > 0) {
#pragma unroll
    for (int item = 0; item < kItems; ++item) {
      const int64_t col = first + item * stride;
      if (col >= args.cols) continue;
      kept[item] = load(col);
      squares += SumOfSquares(kept[item]);
      if (sum != nullptr) StoreVector(kept[item], sum + col);
    }
  } else {
    for (int64_t col = first; col < args.cols; col += stride) {
      const Vector<T, kSize> values = load(col);
      squares += SumOfSquares(values);
      if (sum != nullptr) StoreVector(values, sum + col);
    }
  }
  const float mean = BlockSum(squares, warp_sums) / static_cast<float>(args.cols);
  const float scale = 1.0f / sqrtf(mean + args.eps);
  if constexpr (kItems > 0) {
#pragma unroll
    for (int item = 0; item < kItems; ++item) {
      const int64_t col = first + item * stride;
      if (col < args.cols) StoreVector(Scaled(kept[item], scale, weights[item]), out + col);
    }
  } else {
    for (int64_t col = first; col < args.cols; col += stride) {
      // The sum is in its place by now, and may not be taken twice.
      const Vector<T, kSize> values = sum == nullptr ? load(col) : LoadVector<kSize>(sum + col);
      StoreVector(Scaled(values, scale, LoadVector<kSize>(args.weight + col)), out + col);
    }
  }
}

template <typename T, int kSize>
absl::Status LaunchNorm(const NormArgs<T>& args, int64_t rows, const CudaLaunch& launch) {
  const int64_t vectors = args.cols / kSize;
  // As few a thread as there are threads for.
  int items = 1;
  while (items <= 4 && (vectors + items - 1) / items > kMaxNormThreads) items *= 2;
  const int64_t wanted = items <= 4 ? (vectors + items - 1) / items : kMaxNormThreads;
  const int threads = static_cast<int>((wanted + 31) / 32 * 32);
  const auto kernel = items == 1   ? NormKernel<T, kSize, 1>
                      : items == 2 ? NormKernel<T, kSize, 2>
                      : items == 4 ? NormKernel<T, kSize, 4>
                                   : NormKernel<T, kSize, 0>;
  return LaunchKernel("launch of RMSNorm", kernel, rows, threads, 0, launch, args);
}

// delta, rows may be absent; writes_sum: x becomes x + delta.
absl::Status Norm(const MatrixView& x, const MatrixView* delta, const int32_t* rows,
                  bool writes_sum, const float* weight, float eps, const MatrixView& out,
                  const CudaContext& context) {
  LOCKSTEP_CHECK(x.cols == out.cols && x.dtype == out.dtype);
  LOCKSTEP_CHECK(rows != nullptr || x.rows == out.rows);
  if (delta != nullptr) {
    LOCKSTEP_CHECK(delta->rows == x.rows && delta->cols == x.cols && delta->dtype == x.dtype);
  }
  if (out.rows == 0 || out.cols == 0) return absl::OkStatus();
  const CudaLaunch launch = {context.stream, context.programmatic_launch};
  const bool aligned = RowsAligned16(x) && RowsAligned16(out) && IsAligned16(weight) &&
                       (delta == nullptr || RowsAligned16(*delta));
  return WithElementType(x.dtype, [&](auto element) {
    using T = decltype(element);
    constexpr int kSize = 16 / sizeof(T);
    const NormArgs<T> args = {static_cast<const T*>(x.data),
                              x.stride,
                              delta == nullptr ? nullptr : static_cast<const T*>(delta->data),
                              delta == nullptr ? 0 : delta->stride,
                              rows,
                              writes_sum ? static_cast<T*>(x.data) : nullptr,
                              weight,
                              eps,
                              static_cast<T*>(out.data),
                              out.stride,
                              out.cols};
    return aligned && out.cols % kSize == 0 ? LaunchNorm<T, kSize>(args, out.rows, launch)
                                            : LaunchNorm<T, 1>(args, out.rows, launch);
  });
}

}  // namespace

absl::Status RmsNorm(const MatrixView& x, const float* weight, float eps, const MatrixView& out,
                     const CudaContext& context) {
  return Norm(x, nullptr, nullptr, false, weight, eps, out, context);
}

absl::Status AddRmsNorm(const MatrixView& residual, const MatrixView& delta, const float* weight,
                        float eps, const MatrixView& out, const CudaContext& context) {
  return Norm(residual, &delta, nullptr, true, weight, eps, out, context);
}

absl::Status AddRmsNormRows(const MatrixView& residual, const MatrixView& delta,
                            const int32_t* rows, const float* weight, float eps,
                            const MatrixView& out, const CudaContext& context) {
  return Norm(residual, &delta, rows, false, weight, eps, out, context);
}

}  // namespace lockstep
