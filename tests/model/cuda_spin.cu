#include <cuda_runtime.h>

#include "runtime/core/cuda_errors.h"
#include "tests/model/cuda_spin.h"

namespace lockstep {

namespace {

__device__ int64_t Nanoseconds() {
  int64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

__global__ void SpinKernel(int64_t nanoseconds) {
  const int64_t start = Nanoseconds();
  while (Nanoseconds() - start < nanoseconds) __nanosleep(500);
}

}  // namespace

absl::Status SpinOnDevice(int64_t nanoseconds, CudaStream stream) {
  SpinKernel<<<1, 1, 0, stream>>>(nanoseconds);
  LOCKSTEP_CUDA_LAUNCHED("spin");
  return absl::OkStatus();
}

}  // namespace lockstep
