// CUDA's codes as absl::Status. For files that see CUDA's headers.
#pragma once

#include <cuda_runtime.h>

#include "runtime/core/status.h"

namespace lockstep {

// Internal with the call and CUDA's text, ResourceExhausted where memory ran out; OK for
// cudaSuccess. Clears the thread's last error.
inline absl::Status CudaStatus(cudaError_t code, const char* call) {
  if (code == cudaSuccess) return absl::OkStatus();
  cudaGetLastError();
  const std::string message =
      absl::StrFormat("%s: %s (%s)", call, cudaGetErrorString(code), cudaGetErrorName(code));
  return code == cudaErrorMemoryAllocation ? absl::ResourceExhaustedError(message)
                                           : absl::InternalError(message);
}

}  // namespace lockstep

#define LOCKSTEP_CUDA(call) LOCKSTEP_RETURN_IF_ERROR(::lockstep::CudaStatus((call), #call))
// After a kernel's launch: its configuration was refused.
#define LOCKSTEP_CUDA_LAUNCHED(name) \
  LOCKSTEP_RETURN_IF_ERROR(::lockstep::CudaStatus(cudaGetLastError(), "launch of " name))
