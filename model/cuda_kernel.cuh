// What the operators' kernels share: launch, element types, vectors of elements.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "runtime/core/buffer.h"
#include "runtime/core/cuda_device.h"
#include "runtime/core/cuda_errors.h"
#include "runtime/core/dtype.h"

namespace lockstep {

struct CudaLaunch {
  CudaStream stream;
  bool programmatic;  // see CudaContext::programmatic_launch
};

// Arguments are converted to the kernel's parameters. Every kernel launched so calls
// WaitForPredecessor before it touches anything that another kernel writes or reads.
template <typename... Params, typename... Args>
absl::Status LaunchKernel(const char* name, void (*kernel)(Params...), dim3 grid, int block,
                          int64_t shared_bytes, const CudaLaunch& launch, const Args&... args) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(block));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = launch.stream;
  config.attrs = &attribute;
  config.numAttrs = launch.programmatic ? 1 : 0;
  return CudaStatus(cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...), name);
}

template <typename... Params, typename... Args>
absl::Status LaunchKernel(const char* name, void (*kernel)(Params...), int64_t grid, int block,
                          int64_t shared_bytes, const CudaLaunch& launch, const Args&... args) {
  LOCKSTEP_CHECK(grid > 0 && grid <= 0x7fffffff);
  return LaunchKernel(name, kernel, dim3(static_cast<unsigned>(grid)), block, shared_bytes, launch,
                      args...);
}

// The next kernel may start once all blocks of this one have come here.
__device__ __forceinline__ void LetSuccessorStart() {
#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

// Until the kernels before this one have ended and their results can be read. Nothing where the
// launch was not programmatic.
__device__ __forceinline__ void WaitForPredecessor() {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}

__device__ __forceinline__ float Widen(float x) { return x; }
__device__ __forceinline__ float Widen(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float Widen(__half x) { return __half2float(x); }

// Nearest-even.
template <typename T>
__device__ __forceinline__ T Narrow(float x);
template <>
__device__ __forceinline__ float Narrow<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ __nv_bfloat16 Narrow<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ __forceinline__ __half Narrow<__half>(float x) {
  return __float2half_rn(x);
}

// Elements that are loaded and stored together, 16 bytes at a time where there are as many.
template <typename T, int kSize>
struct alignas(sizeof(T) * kSize < 16 ? sizeof(T) * kSize : 16) Vector {
  T at[kSize];
};

template <int kSize, typename T>
__device__ __forceinline__ Vector<T, kSize> LoadVector(const T* from) {
  return *reinterpret_cast<const Vector<T, kSize>*>(from);
}
template <int kSize, typename T>
__device__ __forceinline__ void StoreVector(const Vector<T, kSize>& value, T* to) {
  *reinterpret_cast<Vector<T, kSize>*>(to) = value;
}

// Sums over the block of each thread's values, the same to all threads. blockDim.x is a multiple of
// 32, at most 512. warp_sums: shared; free again behind the next barrier.
template <int kCount>
__device__ __forceinline__ void BlockSums(float (&values)[kCount], float (*warp_sums)[16]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    for (int lanes = 16; lanes > 0; lanes /= 2) {
      values[i] += __shfl_xor_sync(~0u, values[i], lanes);
    }
    if (threadIdx.x % 32 == 0) warp_sums[i][threadIdx.x / 32] = values[i];
  }
  __syncthreads();
  const unsigned lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    values[i] = lane < blockDim.x / 32 ? warp_sums[i][lane] : 0.0f;
    for (int lanes = 8; lanes > 0; lanes /= 2) {
      values[i] += __shfl_xor_sync(~0u, values[i], lanes);
    }
    values[i] = __shfl_sync(~0u, values[i], 0);
  }
}
__device__ __forceinline__ float BlockSum(float value, float* warp_sums) {
  float values[1] = {value};
  BlockSums<1>(values, reinterpret_cast<float(*)[16]>(warp_sums));
  return values[0];
}

inline bool IsAligned16(const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }
// Every row starts at a multiple of 16 bytes.
inline bool RowsAligned16(const MatrixView& m) {
  return IsAligned16(m.data) && (m.rows <= 1 || m.stride * SizeOf(m.dtype) % 16 == 0);
}

// fn(T()) for the type of a matrix's element.
template <typename Fn>
absl::Status WithElementType(DType dtype, const Fn& fn) {
  switch (dtype) {
    case DType::kF32:
      return fn(float());
    case DType::kF16:
      return fn(__half());
    case DType::kBF16:
      return fn(__nv_bfloat16());
    case DType::kF8E4M3:
      break;
  }
  LOCKSTEP_CHECK(false);
}

}  // namespace lockstep
