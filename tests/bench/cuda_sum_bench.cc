// The sum over ranks with residual addition and norm: in one kernel, one-shot and two-shot, and by
// NCCL with a kernel behind it. Under mpirun with a GPU a rank:
//
//   tests/mpirun.sh 2 cuda_sum_bench
//
// Rows of Qwen2.5-7B (3584 bfloat16). The median of graph launches of many sums each, us a sum, all
// kernels launched programmatically. In brackets, GB/s: S bytes of all rows over the time, times
// 2 (N - 1) / N, what a GPU's links carry in a direction of an all-reduce that reads and writes
// each row where it must (one-shot carries more on more than 2 ranks). With few blocks: the
// two-shot kernel as it would run beside products.
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
constexpr int64_t kMaxRows = 8192, kRowBytes = kHidden * 2, kBytes = kMaxRows * kRowBytes;

double MicrosecondsASum(CudaStream stream, int64_t rows,
                        const std::function<absl::Status(int)>& sum) {
  const int num_sums = rows <= 512 ? 100 : 20;
  for (int i = 0; i < 4; ++i) OR_ABORT(sum(i));
  OR_ABORT(Synchronize(stream));
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  const auto check = [](cudaError_t code) {
    if (code != cudaSuccess) OR_ABORT(absl::InternalError(cudaGetErrorString(code)));
  };
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < num_sums; ++i) OR_ABORT(sum(i));
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
  return times[times.size() / 2] * 1e3 / num_sums;
}

// Numbers of a rank, one row after another the same.
void Fill(void* to, int input, CudaStream stream) {
  const std::vector<float> row = Numbers(job->rank(), kHidden, DType::kBF16, input);
  std::vector<BF16> numbers(kMaxRows * kHidden);
  for (int64_t r = 0; r < kMaxRows; ++r) {
    Convert(DType::kF32, row.data(), DType::kBF16, numbers.data() + r * kHidden, kHidden);
  }
  OR_ABORT(CopyAsync(to, numbers.data(), kBytes, stream));
  OR_ABORT(Synchronize(stream));
}

class Sums {
 public:
  Sums()
      : binding_(VALUE_OR_ABORT(BindCudaDevice(*job))),
        stream_(VALUE_OR_ABORT(OwnedCudaStream::Create())),
        linear_(VALUE_OR_ABORT(CudaLinear::Create())),
        nccl_(VALUE_OR_ABORT(NcclCommunicator::Create(*job, binding_.device))),
        peers_(VALUE_OR_ABORT(PeerWindows::Create(*job, kBytes))),
        context_{stream_.get(), binding_.info.num_multiprocessors, *linear_, true} {
    for (DeviceBuffer* const buffer : {&residual_, &normed_, &delta_}) {
      *buffer = VALUE_OR_ABORT(DeviceBuffer::Create(kBytes, "operands"));
      Fill(buffer->data(), 0, stream_.get());
    }
    const std::vector<float> weight = Numbers(0, kHidden, DType::kF32, 1);
    weight_ = VALUE_OR_ABORT(DeviceBuffer::Create(kHidden * 4, "weight"));
    OR_ABORT(CopyAsync(weight_.data(), weight.data(), kHidden * 4, stream_.get()));
    for (int i = 0; i < PeerWindows::kNumWindows; ++i) Fill(peers_->window(i), i, stream_.get());
  }
  ~Sums() {
    OR_ABORT(job->Barrier());
    OR_ABORT(peers_->Close(*job));
  }

  double ByPeers(SumPath path, int64_t rows, int max_blocks) {
    return MicrosecondsASum(stream_.get(), rows, [&](int i) {
      const PeerSum sum = {
          .path = path, .window = i % 2, .rows = {0, rows}, .max_blocks = max_blocks};
      MatrixView out = View(normed_, rows);
      if (path == SumPath::kTwoShot) out.data = peers_->window(i % 2);
      return SumAddRmsNorm(*peers_, sum, View(residual_, rows), weight_.as<const float>(), 1e-6f,
                           out, context_);
    });
  }
  double ByNccl(int64_t rows) {
    return MicrosecondsASum(stream_.get(), rows, [&](int) -> absl::Status {
      LOCKSTEP_RETURN_IF_ERROR(
          nccl_->AllReduceSum(delta_.data(), rows * kHidden, DType::kBF16, stream_.get()));
      return AddRmsNorm(View(residual_, rows), View(delta_, rows), weight_.as<const float>(), 1e-6f,
                        View(normed_, rows), context_);
    });
  }

 private:
  static MatrixView View(const DeviceBuffer& buffer, int64_t rows) {
    return {buffer.data(), DType::kBF16, rows, kHidden, kHidden};
  }

  CudaBinding binding_;
  OwnedCudaStream stream_;
  std::unique_ptr<CudaLinear> linear_;
  std::unique_ptr<NcclCommunicator> nccl_;
  std::unique_ptr<PeerWindows> peers_;
  CudaContext context_;
  DeviceBuffer residual_, normed_, delta_, weight_;
};

void Run() {
  Sums sums;
  const auto print = [](const std::string& text) {
    if (job->rank() != 0) return;
    std::printf("%s", text.c_str());
    std::fflush(stdout);
  };
  print(absl::StrFormat("%d ranks\n", job->size()));
  for (const int64_t rows : {1, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192}) {
    const double link_bytes = 2.0 * (job->size() - 1) / job->size() * rows * kRowBytes;
    const auto timed = [&](const char* what, double us) {
      print(absl::StrFormat(" | %s %7.2f us (%5.1f GB/s)", what, us, link_bytes / us / 1e3));
    };
    print(absl::StrFormat("%4d rows, %8.1f KiB", rows, rows * kRowBytes / 1024.0));
    timed("one-shot", sums.ByPeers(SumPath::kOneShot, rows, kMaxPeerBlocks));
    timed("two-shot", sums.ByPeers(SumPath::kTwoShot, rows, kMaxPeerBlocks));
    timed("NCCL and norm", sums.ByNccl(rows));
    if (rows >= 512) {
      for (const int blocks : {64, 32, 16}) {
        timed(absl::StrFormat("two-shot, %d blocks", blocks).c_str(),
              sums.ByPeers(SumPath::kTwoShot, rows, blocks));
      }
    }
    print("\n");
  }
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
