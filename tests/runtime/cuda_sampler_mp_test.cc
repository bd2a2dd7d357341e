// The sampler over the GPUs of a job, a rank each, against the one on the hosts.
#include "parallel/cuda_ranks.h"
#include "tests/parallel/gpu_job.h"
#include "tests/runtime/cuda_sampler_checks.h"

namespace lockstep {
namespace {

TEST(CudaSamplerJobTest, MixesOfAllKinds) {
  if (!GpuForEveryRank()) GTEST_SKIP() << "fewer GPUs than ranks";
  const CudaBinding binding = VALUE_OR_ABORT(BindCudaDevice(*job));
  const OwnedCudaStream stream = VALUE_OR_ABORT(OwnedCudaStream::Create());
  std::unique_ptr<NcclCommunicator> nccl;
  if (job->size() > 1) nccl = VALUE_OR_ABORT(NcclCommunicator::Create(*job, binding.device));
  CheckMixes({.communicator = *job, .nccl = nccl.get(), .stream = stream.get()});
  // Others may be inside a collective of the next mix.
  if (HasFailure()) OR_ABORT(absl::InternalError("samplers differ, see above"));
  OR_ABORT(Synchronize(stream.get()));
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) { return lockstep::RunJobTests(argc, argv); }
