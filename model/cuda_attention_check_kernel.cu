#include "model/cuda_attention_check.h"
#include "model/cuda_kernel.cuh"

namespace lockstep {

namespace {

constexpr int kThreads = 256;

// Not a number on one side alone is infinitely far; on both sides it is what the formula gives.
__device__ float Distance(float value, float expected) {
  if (isnan(value) && isnan(expected)) return 0;
  if (value == expected) return 0;  // infinities, too
  const float distance = fabsf(value - expected);
  return isnan(distance) ? INFINITY : distance;
}

__device__ float BlockMax(float value, float* shared) {
  shared[threadIdx.x] = value;
  __syncthreads();
  for (int half = kThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) {
      shared[threadIdx.x] = fmaxf(shared[threadIdx.x], shared[threadIdx.x + half]);
    }
    __syncthreads();
  }
  const float max = shared[0];
  __syncthreads();
  return max;
}

// A block a row.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    CompareRowsKernel(const T* values, int64_t value_stride, const T* expected,
                      int64_t expected_stride, int64_t cols, CudaRowDifference* differences) {
  WaitForPredecessor();
  __shared__ float shared[kThreads];
  __shared__ int32_t column;
  const T* const mine = values + blockIdx.x * value_stride;
  const T* const other = expected + blockIdx.x * expected_stride;
  float magnitude = 0, distance = 0;
  for (int64_t c = threadIdx.x; c < cols; c += kThreads) {
    const float there = Widen(other[c]);
    if (isfinite(there)) magnitude = fmaxf(magnitude, fabsf(there));
    distance = fmaxf(distance, Distance(Widen(mine[c]), there));
  }
  magnitude = BlockMax(magnitude, shared);
  const float largest = BlockMax(distance, shared);
  if (threadIdx.x == 0) column = 0x7fffffff;
  __syncthreads();
  for (int64_t c = threadIdx.x; c < cols; c += kThreads) {
    if (Distance(Widen(mine[c]), Widen(other[c])) == largest) {
      atomicMin(&column, static_cast<int32_t>(c));
    }
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  const float relative = largest == 0 ? 0.0f : magnitude > 0 ? largest / magnitude : INFINITY;
  differences[blockIdx.x] =
      CudaRowDifference{relative, column, Widen(mine[column]), Widen(other[column])};
}

}  // namespace

absl::Status CompareRows(const MatrixView& value, const MatrixView& expected,
                         CudaRowDifference* differences, const CudaContext& context) {
  LOCKSTEP_CHECK(value.rows == expected.rows && value.cols == expected.cols &&
                 value.dtype == expected.dtype && value.cols > 0);
  if (value.rows == 0) return absl::OkStatus();
  return WithElementType(value.dtype, [&](auto element) {
    using T = decltype(element);
    return LaunchKernel("comparison of rows", CompareRowsKernel<T>, value.rows, kThreads, 0,
                        {context.stream, context.programmatic_launch},
                        static_cast<const T*>(value.data), value.stride,
                        static_cast<const T*>(expected.data), expected.stride, value.cols,
                        differences);
  });
}

}  // namespace lockstep
