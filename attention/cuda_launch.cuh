// Launching a kernel, with programmatic stream serialization where it is asked for.
#pragma once

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

}  // namespace lockstep
