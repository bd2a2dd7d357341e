// Copies of boxes of arrays from memory to shared memory (PTX ISA, "cp.async.bulk.tensor"), see
// runtime/core/cuda_tensor_map.h and, for the barriers, cuda_async_copy.cuh. For sm_90 and later.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "attention/cuda_tensor_core.cuh"

namespace lockstep {

// `map`: a __grid_constant__ parameter of the kernel, here and below.
__device__ __forceinline__ void PrefetchTensorMap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// How the L2 cache treats what a copy brings.
__device__ __forceinline__ uint64_t EvictFirstPolicy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ uint64_t EvictLastPolicy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// The box whose first element has these coordinates, the innermost first. The barrier counts a
// whole box, whatever lies beyond the array.
__device__ __forceinline__ void CopyBox(void* to, const CUtensorMap* map, int x, int y,
                                        uint64_t* barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(SharedAddress(to)),
      "l"(map), "r"(x), "r"(y), "r"(SharedAddress(barrier)), "l"(policy)
      : "memory");
}
__device__ __forceinline__ void CopyBox(void* to, const CUtensorMap* map, int x, int y, int z,
                                        int w, uint64_t* barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(SharedAddress(to)),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(SharedAddress(barrier)), "l"(policy)
      : "memory");
}

}  // namespace lockstep
