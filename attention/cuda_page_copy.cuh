// Copies of a cache's pages by Hopper's copy engine, and the barriers in shared memory that they
// complete on: the kernel's side of cuda_page_copy.h. PTX ISA: "cp.async.bulk.tensor", "mbarrier".
// For sm_90 and up.
#pragma once

#include "attention/cuda_page_copy.h"
#include "attention/cuda_tensor_core.cuh"

namespace lockstep {

// ---- Barriers -----------------------------------------------------------------------------------
//
// A barrier's phase is complete when `arrivals` threads have arrived and as many bytes as they
// expect have come; then the next phase begins. Phases have parities 0, 1, 0, ...: wait for the
// first with parity 0.

// One thread does it; then FenceBarriers, then a barrier of all threads that will use it.
__device__ inline void InitBarrier(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(SharedAddress(barrier)),
               "r"(arrivals)
               : "memory");
}
// Makes this thread's InitBarrier visible to the copy engine.
__device__ inline void FenceBarriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ inline void Arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(SharedAddress(barrier)) : "memory");
}
// The phase completes only after `bytes` more have come. Before the copies that bring them.
__device__ inline void ArriveAndExpect(uint64_t* barrier, uint32_t bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(SharedAddress(barrier)),
      "r"(bytes)
      : "memory");
}
// True when the phase of that parity is complete; may wait a while before it says no.
__device__ inline bool TryWait(uint64_t* barrier, int parity) {
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
__device__ inline void Wait(uint64_t* barrier, int parity) {
  while (!TryWait(barrier, parity)) {
  }
}

// Orders this thread's ordinary accesses to shared memory before the copy engine's, and the tensor
// cores' (wgmma), that are issued after a barrier which follows.
__device__ inline void FenceAsyncProxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- Copies -------------------------------------------------------------------------------------

// Of a __grid_constant__ parameter; by one thread, early: saves the first copy the way to it.
__device__ inline void PrefetchMap(const PageMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// The box whose first row of the matrix is `row`, a multiple of 8, and whose first panel is
// `panel`, to `to` (a shared address, a multiple of 1024). One thread's. The barrier gets all bytes
// of the box (rows * panels * 128), those beyond the matrix, too.
__device__ inline void CopyBox(uint32_t to, const PageMap& map, int32_t row, int32_t panel,
                               uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%2, %3, %3, %4}], [%5];" ::"r"(to),
      "l"(&map), "r"(panel * (kPanelBytes / 2)), "r"(0), "r"(row / kPageRowMultiple),
      "r"(SharedAddress(barrier))
      : "memory");
}

// Offset of the 16-byte piece `piece` of row `row` in an array of boxes, one after the other, of
// `panels` panels each.
__device__ inline uint32_t BoxOffset(int row, int piece, int panels) {
  return static_cast<uint32_t>(((row / 8 * panels + piece / 8) * 8 + row % 8) * 128 +
                               (piece % 8 ^ row % 8) * 16);
}

}  // namespace lockstep
