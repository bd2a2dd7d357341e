// Hopper's copies from device memory to shared memory that run beside the threads, and the barriers
// that they complete on (PTX ISA, "cp.async.bulk", "cp.async.bulk.tensor", "mbarrier"). Boxes come
// out of arrays that cuda_tensor_map.h describes. For sm_90 and up.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace lockstep {

__device__ inline uint32_t SharedAddress(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// ---- Barriers -----------------------------------------------------------------------------------
//
// A barrier's phase is complete when `arrivals` threads have arrived and as many bytes as they
// expect have come; then the next phase begins. Phases have parities 0, 1, 0, ...: wait for the
// first with parity 0.

// One thread does it; then PublishBarriers, then a barrier of all threads that will use it.
__device__ __forceinline__ void InitBarrier(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(SharedAddress(barrier)),
               "r"(arrivals)
               : "memory");
}
// Makes this thread's InitBarrier visible to the copy engine.
__device__ __forceinline__ void PublishBarriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void Arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(SharedAddress(barrier)) : "memory");
}
// The phase completes only after `bytes` more have come. Before the copies that bring them.
__device__ __forceinline__ void ArriveExpecting(uint64_t* barrier, uint32_t bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(SharedAddress(barrier)),
      "r"(bytes)
      : "memory");
}
// True when the phase of that parity is complete; may wait a while before it says no.
__device__ __forceinline__ bool TryWait(uint64_t* barrier, int parity) {
  uint32_t complete;
  asm volatile(
      "{\n.reg .pred complete;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 complete, [%1], %2;\n"
      "selp.u32 %0, 1, 0, complete;\n}"
      : "=r"(complete)
      : "r"(SharedAddress(barrier)), "r"(parity)
      : "memory");
  return complete != 0;
}
__device__ __forceinline__ void Wait(uint64_t* barrier, int parity) {
  while (!TryWait(barrier, parity)) {
  }
}

// Orders this thread's ordinary accesses to shared memory before the copy engine's, and the tensor
// cores' (wgmma), that are issued after a barrier which follows.
__device__ __forceinline__ void FenceAsyncProxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- Copies -------------------------------------------------------------------------------------
//
// By one thread. `to` is a shared address. A barrier gets all bytes of a box, those beyond the
// array, which arrive as zeros, too.

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

// Of a __grid_constant__ parameter, here and below; early: saves the first copy the way to it.
__device__ __forceinline__ void PrefetchTensorMap(const void* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Contiguous bytes: a multiple of 16, both addresses too.
__device__ __forceinline__ void CopyBytes(uint32_t to, const void* from, uint32_t bytes,
                                          uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(SharedAddress(barrier))
      : "memory");
}

// The box whose first element has these coordinates, the innermost first.
__device__ __forceinline__ void CopyBox(uint32_t to, const CUtensorMap* map, int x, int y,
                                        uint64_t* barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(map), "r"(x), "r"(y), "r"(SharedAddress(barrier)), "l"(policy)
      : "memory");
}
__device__ __forceinline__ void CopyBox(uint32_t to, const CUtensorMap* map, int x, int y, int z,
                                        uint64_t* barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(SharedAddress(barrier)), "l"(policy)
      : "memory");
}
__device__ __forceinline__ void CopyBox(uint32_t to, const CUtensorMap* map, int x, int y, int z,
                                        int w, uint64_t* barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(to),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(SharedAddress(barrier)), "l"(policy)
      : "memory");
}
// Without a word to the L2 cache.
__device__ __forceinline__ void CopyBox(uint32_t to, const CUtensorMap* map, int x, int y, int z,
                                        int w, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%2, %3, %4, %5}], [%6];" ::"r"(to),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(SharedAddress(barrier))
      : "memory");
}

}  // namespace lockstep
