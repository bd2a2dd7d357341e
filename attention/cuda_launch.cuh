// Launching a kernel, with programmatic stream serialization where it is asked for, and choosing
// its template arguments.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <type_traits>

#include "attention/cuda_kernels.h"
#include "runtime/core/cuda_device.h"
#include "runtime/core/cuda_errors.h"

namespace lockstep {

template <typename Params>
absl::Status LaunchKernel(void (*kernel)(Params), dim3 grid, int threads, int64_t shared_bytes,
                          const Params& params, bool programmatic, CudaStream stream,
                          const char* name) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = programmatic ? 1 : 0;
  return CudaStatus(cudaLaunchKernelEx(&config, kernel, params), name);
}

// fn(T{}, std::integral_constant<int, kDim>{}) for the smallest kDim that holds head_dim.
template <typename T, typename Fn>
auto WithHeadDim(int64_t head_dim, Fn fn) {
  if (head_dim <= 64) return fn(T{}, std::integral_constant<int, 64>{});
  if (head_dim <= 80) return fn(T{}, std::integral_constant<int, 80>{});
  if (head_dim <= 96) return fn(T{}, std::integral_constant<int, 96>{});
  if (head_dim <= 128) return fn(T{}, std::integral_constant<int, 128>{});
  LOCKSTEP_CHECK(head_dim <= kMaxTensorCoreHeadDim);
  return fn(T{}, std::integral_constant<int, 256>{});
}

// The same for activations of bfloat16 and float16.
template <typename Fn>
auto WithTypes(DType dtype, int64_t head_dim, Fn fn) {
  LOCKSTEP_CHECK(dtype != DType::kF32);
  if (dtype == DType::kF16) return WithHeadDim<__half>(head_dim, fn);
  return WithHeadDim<__nv_bfloat16>(head_dim, fn);
}

// fn(T{}, Cache{}, std::integral_constant<int, kDim>{}).
template <typename Fn>
auto WithTypes(AttentionTypes types, int64_t head_dim, Fn fn) {
  return WithTypes(types.activations, head_dim, [&](auto type, auto dim) {
    if (types.cache == DType::kF8E4M3) return fn(type, __nv_fp8_e4m3(), dim);
    LOCKSTEP_CHECK(types.cache == types.activations);
    return fn(type, type, dim);
  });
}

}  // namespace lockstep
