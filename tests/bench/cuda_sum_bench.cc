// The sum over ranks with residual addition and norm, in one kernel and by NCCL with a kernel
// behind it, under mpirun with a GPU a rank:
//
//   tests/mpirun.sh 2 cuda_sum_bench
//
// Rows of Qwen2.5-7B (3584 bfloat16). The median of graph launches of 100 sums each, us a sum.
#include <cuda_runtime.h>

#include <algorithm>
#include <functional>

#include "model/cuda_sum.h"
#include "parallel/cuda_ranks.h"
#include "parallel/nccl_communicator.h"
#include "tests/parallel/gpu_job.h"

namespace lockstep {
namespace {

constexpr int64_t kHidden = 3584;
constexpr int kSums = 100;

double MicrosecondsASum(CudaStream stream, const std::function<absl::Status(int)>& sum) {
  for (int i = 0; i < 4; ++i) OR_ABORT(sum(i));
  OR_ABORT(Synchronize(stream));
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  const auto check = [](cudaError_t code) {
    if (code != cudaSuccess) OR_ABORT(absl::InternalError(cudaGetErrorString(code)));
  };
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < kSums; ++i) OR_ABORT(sum(i));
  check(cudaStreamEndCapture(stream, &graph));
  check(cudaGraphInstantiate(&executable, graph, 0));
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin));
  check(cudaEventCreate(&end));
  std::vector<float> times;
  for (int i = 0; i < 24; ++i) {
    OR_ABORT(job->Barrier());
    check(cudaEventRecord(begin, stream));
    check(cudaGraphLaunch(executable, stream));
    check(cudaEventRecord(end, stream));
    OR_ABORT(Synchronize(stream));
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin, end));
    if (i >= 3) times.push_back(ms);
  }
  check(cudaEventDestroy(begin));
  check(cudaEventDestroy(end));
  check(cudaGraphExecDestroy(executable));
  check(cudaGraphDestroy(graph));
  std::sort(times.begin(), times.end());
  return times[times.size() / 2] * 1e3 / kSums;
}

void Run() {
  const CudaBinding binding = VALUE_OR_ABORT(BindCudaDevice(*job));
  const OwnedCudaStream stream = VALUE_OR_ABORT(OwnedCudaStream::Create());
  const auto linear = VALUE_OR_ABORT(CudaLinear::Create());
  const auto nccl = VALUE_OR_ABORT(NcclCommunicator::Create(*job, binding.device));
  constexpr int64_t kMaxRows = 1024, kBytes = kMaxRows * kHidden * 2;
  const auto peers = VALUE_OR_ABORT(PeerWindows::Create(*job, kBytes));
  std::vector<DeviceBuffer> buffers;
  for (int i = 0; i < 4; ++i) {
    buffers.push_back(VALUE_OR_ABORT(DeviceBuffer::Create(kBytes, "operands")));
    std::vector<BF16> numbers(kMaxRows * kHidden);
    const std::vector<float> floats = Numbers(job->rank(), kMaxRows * kHidden, DType::kBF16, i);
    Convert(DType::kF32, floats.data(), DType::kBF16, numbers.data(), kMaxRows * kHidden);
    OR_ABORT(CopyAsync(buffers[i].data(), numbers.data(), kBytes, stream.get()));
    if (i < PeerWindows::kNumWindows) {
      OR_ABORT(CopyAsync(peers->window(i), numbers.data(), kBytes, stream.get()));
    }
    OR_ABORT(Synchronize(stream.get()));
  }
  const float* weight = buffers[3].as<const float>();
  for (const int64_t rows : {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024}) {
    const auto view = [&](const DeviceBuffer& buffer) {
      return MatrixView{buffer.data(), DType::kBF16, rows, kHidden, kHidden};
    };
    double times[4] = {};
    for (const bool programmatic : {false, true}) {
      const CudaContext context = {stream.get(), binding.info.num_multiprocessors, *linear,
                                   programmatic};
      times[programmatic] = MicrosecondsASum(stream.get(), [&](int i) {
        return SumAddRmsNorm(*peers, i % 2, ResidualUse::kAdd, view(buffers[0]), nullptr, weight,
                             1e-6f, view(buffers[1]), context);
      });
      times[2 + programmatic] = MicrosecondsASum(stream.get(), [&](int) -> absl::Status {
        LOCKSTEP_RETURN_IF_ERROR(
            nccl->AllReduceSum(buffers[2].data(), rows * kHidden, DType::kBF16, stream.get()));
        return AddRmsNorm(view(buffers[0]), view(buffers[2]), weight, 1e-6f, view(buffers[1]),
                          context);
      });
    }
    if (job->rank() == 0) {
      std::printf(
          "%d ranks, %4d rows: one kernel %6.2f us, programmatic %6.2f us | NCCL and a kernel "
          "%6.2f "
          "us, programmatic %6.2f us\n",
          job->size(), static_cast<int>(rows), times[0], times[1], times[2], times[3]);
      std::fflush(stdout);
    }
  }
  OR_ABORT(job->Barrier());
  OR_ABORT(peers->Close(*job));
}

}  // namespace
}  // namespace lockstep

int main() {
  auto communicator = lockstep::CreateMpiCommunicator();
  if (!communicator.ok()) {
    std::fprintf(stderr, "%s\n", communicator.status().ToString().c_str());
    return 1;
  }
  lockstep::job = communicator->get();
  lockstep::Run();
  return 0;
}
