// Runs under mpirun, a GPU a rank: every rank runs the same tests, rank 0 prints, and the exit
// status is not 0 on any rank where a test failed on one. Skips where there are fewer GPUs than
// ranks.
#include <cuda_runtime.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "parallel/cuda_ranks.h"
#include "parallel/nccl_communicator.h"
#include "tests/parallel/gpu_job.h"

namespace lockstep {
namespace {

class NcclTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!GpuForEveryRank()) GTEST_SKIP() << "fewer GPUs than ranks";
    binding_ = VALUE_OR_ABORT(BindCudaDevice(*job));
    stream_ = VALUE_OR_ABORT(OwnedCudaStream::Create());
    nccl_ = VALUE_OR_ABORT(NcclCommunicator::Create(*job, binding_.device));
  }
  void TearDown() override {
    if (nccl_ == nullptr) return;
    OR_ABORT(Synchronize(stream()));
    OR_ABORT(nccl_->AsyncError());
  }
  CudaStream stream() const { return stream_.get(); }

  void Upload(const std::vector<float>& numbers, DType dtype, void* device) {
    std::vector<char> bytes(numbers.size() * SizeOf(dtype));
    Convert(DType::kF32, numbers.data(), dtype, bytes.data(), numbers.size());
    OR_ABORT(CopyAsync(device, bytes.data(), bytes.size(), stream()));
    OR_ABORT(Synchronize(stream()));
  }
  std::vector<char> Download(const void* device, int64_t bytes) {
    std::vector<char> host(bytes);
    OR_ABORT(CopyAsync(host.data(), device, bytes, stream()));
    OR_ABORT(Synchronize(stream()));
    return host;
  }
  // data [count] is the sum of every rank's Numbers, and the same bits on all.
  void ExpectSum(const void* device, int64_t count, DType dtype, uint32_t seed);

  CudaBinding binding_;
  OwnedCudaStream stream_;
  std::unique_ptr<NcclCommunicator> nccl_;
};

void NcclTest::ExpectSum(const void* device, int64_t count, DType dtype, uint32_t seed) {
  const std::vector<char> bytes = Download(device, count * SizeOf(dtype));
  std::vector<float> sums(count);
  Convert(dtype, bytes.data(), DType::kF32, sums.data(), count);
  std::vector<double> expected(count), magnitudes(count);
  for (int rank = 0; rank < job->size(); ++rank) {
    const std::vector<float> numbers = Numbers(rank, count, dtype, seed);
    for (int64_t i = 0; i < count; ++i) {
      expected[i] += numbers[i];
      magnitudes[i] += std::abs(numbers[i]);
    }
  }
  const double rounding = dtype == DType::kBF16  ? 1.0 / 256
                          : dtype == DType::kF16 ? 1.0 / 2048
                                                 : 1.0 / 16777216;
  for (int64_t i = 0; i < count; ++i) {
    const double tolerance = 1.01 * rounding * (job->size() - 1) * magnitudes[i] + 1e-12;
    if (!(std::abs(sums[i] - expected[i]) <= tolerance)) {
      ADD_FAILURE() << Name(dtype) << " " << i << " of " << count << ": " << sums[i] << " for "
                    << expected[i];
      break;
    }
  }
  std::vector<char> all(bytes.size() * job->size());
  OR_ABORT(job->AllGather(bytes.data(), bytes.size(), all.data()));
  for (int rank = 0; rank < job->size(); ++rank) {
    EXPECT_EQ(std::memcmp(all.data() + rank * bytes.size(), bytes.data(), bytes.size()), 0)
        << "the bits of rank " << rank << " differ";
  }
}

constexpr DType kTypes[] = {DType::kF32, DType::kBF16, DType::kF16};

TEST_F(NcclTest, BindsOneGpuARank) {
  EXPECT_EQ(binding_.local_rank, job->rank());  // one host
  EXPECT_FALSE(binding_.info.uuid.empty());
  EXPECT_EQ(nccl_->rank(), job->rank());
  EXPECT_EQ(nccl_->size(), job->size());
  if (job->rank() == 0) {
    std::printf("NCCL %s, %s\n", NcclCommunicator::Version().c_str(), binding_.info.name.c_str());
  }
}

TEST_F(NcclTest, AllReduceSum) {
  uint32_t seed = 0;
  for (const DType dtype : kTypes) {
    for (const int64_t count : {int64_t{0}, int64_t{1}, int64_t{7}, int64_t{3584},
                                int64_t{3584} * 64 + 1, int64_t{3584} * 1024}) {
      DeviceBuffer data = VALUE_OR_ABORT(DeviceBuffer::Create(count * SizeOf(dtype), "data"));
      Upload(Numbers(job->rank(), count, dtype, ++seed), dtype, data.data());
      OR_ABORT(nccl_->AllReduceSum(data.data(), count, dtype, stream()));
      ExpectSum(data.data(), count, dtype, seed);
    }
  }
}

TEST_F(NcclTest, GathersAndBroadcasts) {
  for (const int64_t bytes : {1, 17, 4096, 1000003}) {
    DeviceBuffer send = VALUE_OR_ABORT(DeviceBuffer::Create(bytes, "data"));
    DeviceBuffer all = VALUE_OR_ABORT(DeviceBuffer::Create(bytes * job->size(), "data"));
    OR_ABORT(FillBytesAsync(send.data(), job->rank() + 1, bytes, stream()));
    OR_ABORT(FillBytesAsync(all.data(), 0xff, bytes * job->size(), stream()));
    OR_ABORT(nccl_->AllGather(send.data(), bytes, all.data(), stream()));
    const std::vector<char> gathered = Download(all.data(), bytes * job->size());
    for (int64_t i = 0; i < bytes * job->size(); ++i) ASSERT_EQ(gathered[i], i / bytes + 1);
    for (int root = 0; root < job->size(); ++root) {
      OR_ABORT(FillBytesAsync(send.data(), job->rank() + 1, bytes, stream()));
      OR_ABORT(nccl_->Broadcast(send.data(), bytes, root, stream()));
      for (const char byte : Download(send.data(), bytes)) ASSERT_EQ(byte, root + 1);
    }
  }
}

TEST_F(NcclTest, SumsInAGraph) {
  const int64_t count = 3584;
  DeviceBuffer data = VALUE_OR_ABORT(DeviceBuffer::Create(count * 2, "data"));
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  ASSERT_EQ(cudaStreamBeginCapture(stream(), cudaStreamCaptureModeThreadLocal), cudaSuccess);
  const absl::Status captured = nccl_->AllReduceSum(data.data(), count, DType::kBF16, stream());
  ASSERT_EQ(cudaStreamEndCapture(stream(), &graph), cudaSuccess);
  OR_ABORT(captured);
  ASSERT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
  for (uint32_t seed = 100; seed < 110; ++seed) {
    Upload(Numbers(job->rank(), count, DType::kBF16, seed), DType::kBF16, data.data());
    ASSERT_EQ(cudaGraphLaunch(executable, stream()), cudaSuccess);
    ExpectSum(data.data(), count, DType::kBF16, seed);
  }
  EXPECT_EQ(cudaGraphExecDestroy(executable), cudaSuccess);
  EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
}

TEST_F(NcclTest, TwoRanksOnOneGpuAreRefusedAlike) {
  if (job->size() == 1) GTEST_SKIP() << "one rank";
  OR_ABORT(SelectCudaDevice(0).status());
  const absl::Status status = NcclCommunicator::Create(*job, 0).status();
  OR_ABORT(SelectCudaDevice(binding_.device).status());
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  char text[1024] = {};
  std::snprintf(text, sizeof(text), "%s", status.ToString().c_str());
  std::vector<char> all(sizeof(text) * job->size());
  OR_ABORT(job->AllGather(text, sizeof(text), all.data()));
  for (int rank = 0; rank < job->size(); ++rank) {
    EXPECT_STREQ(all.data() + rank * sizeof(text), text);
  }
  EXPECT_NE(std::strstr(text, "1 distinct GPUs"), nullptr) << text;
}

TEST_F(NcclTest, AnotherDeviceThanTheSelectedOneIsRefused) {
  const absl::Status status = NcclCommunicator::Create(*job, binding_.device + 100).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
}

// Last: the others wait for a sum that rank 0 never enters, and get away.
TEST_F(NcclTest, ZAbortFreesWhoWaits) {
  const int64_t count = 3584;
  DeviceBuffer data = VALUE_OR_ABORT(DeviceBuffer::Create(count * 2, "data"));
  OR_ABORT(FillBytesAsync(data.data(), 0, count * 2, stream()));
  if (job->size() > 1 && job->rank() > 0) {
    OR_ABORT(nccl_->AllReduceSum(data.data(), count, DType::kBF16, stream()));
    std::thread watchdog([this] {
      std::this_thread::sleep_for(std::chrono::milliseconds(300));
      nccl_->Abort();
    });
    (void)Synchronize(stream());  // ends; with or without an error is NCCL's matter
    watchdog.join();
  } else {
    nccl_->Abort();
  }
  const absl::Status refused = nccl_->AllReduceSum(data.data(), count, DType::kBF16, stream());
  EXPECT_EQ(refused.code(), absl::StatusCode::kAborted) << refused;
  nccl_ = nullptr;
  OR_ABORT(job->Barrier());
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) { return lockstep::RunJobTests(argc, argv); }
