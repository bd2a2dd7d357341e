// A build without CUDA samples on the host, and says so.
#include "runtime/cuda_sampler.h"

namespace lockstep {

absl::StatusOr<std::unique_ptr<CudaSampler>> CudaSampler::Create(const CudaSamplerOptions&) {
  return absl::UnimplementedError("this build of Lockstep has no CUDA: use --device cpu");
}

}  // namespace lockstep
