// What the tests of the sum over ranks share. They run under mpirun with a GPU a rank, or all on
// one GPU (gpu_job.h).
#pragma once

#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "model/cuda_sum.h"
#include "tests/parallel/gpu_job.h"

namespace lockstep {

inline constexpr float kSumEps = 1e-5f;
inline constexpr int64_t kSumWindowBytes = int64_t{8} << 20;
inline constexpr uint32_t kResidualSeed = 77;  // the same on all ranks

class SumTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!OnOneGpu() && !GpuForEveryRank()) GTEST_SKIP() << "fewer GPUs than ranks";
    num_multiprocessors_ = VALUE_OR_ABORT(TakeGpu()).num_multiprocessors;
    stream_ = VALUE_OR_ABORT(OwnedCudaStream::Create());
    linear_ = VALUE_OR_ABORT(CudaLinear::Create());
    peers_ = VALUE_OR_ABORT(PeerWindows::Create(*job, kSumWindowBytes));
  }
  void TearDown() override {
    if (peers_ == nullptr) return;
    OR_ABORT(Synchronize(stream()));
    OR_ABORT(job->Barrier());
    OR_ABORT(peers_->Close(*job));
  }
  CudaStream stream() const { return stream_.get(); }
  CudaContext Context(bool programmatic) {
    return {stream(), num_multiprocessors_, *linear_, programmatic};
  }

  DeviceBuffer Device(const std::vector<float>& numbers, DType dtype) {
    const int64_t count = static_cast<int64_t>(numbers.size());
    DeviceBuffer device = VALUE_OR_ABORT(DeviceBuffer::Create(count * SizeOf(dtype), "numbers"));
    std::vector<char> bytes(count * SizeOf(dtype));
    Convert(DType::kF32, numbers.data(), dtype, bytes.data(), count);
    OR_ABORT(CopyAsync(device.data(), bytes.data(), count * SizeOf(dtype), stream()));
    OR_ABORT(Synchronize(stream()));
    return device;
  }
  DeviceBuffer Device(const std::vector<int32_t>& numbers) {
    const int64_t bytes = static_cast<int64_t>(numbers.size()) * 4;
    DeviceBuffer device = VALUE_OR_ABORT(DeviceBuffer::Create(bytes, "numbers"));
    OR_ABORT(CopyAsync(device.data(), numbers.data(), bytes, stream()));
    OR_ABORT(Synchronize(stream()));
    return device;
  }
  std::vector<float> Host(const void* device, int64_t count, DType dtype) {
    std::vector<char> bytes(count * SizeOf(dtype));
    OR_ABORT(CopyAsync(bytes.data(), device, count * SizeOf(dtype), stream()));
    OR_ABORT(Synchronize(stream()));
    std::vector<float> numbers(count);
    Convert(dtype, bytes.data(), DType::kF32, numbers.data(), count);
    return numbers;
  }
  // The sum of all ranks' Numbers, in rank order, plus `residual` (if any), rounded once.
  static std::vector<float> Sum(int64_t count, DType dtype, uint32_t seed,
                                const std::vector<float>* residual) {
    std::vector<float> sum = Numbers(0, count, dtype, seed);
    for (int rank = 1; rank < job->size(); ++rank) {
      const std::vector<float> part = Numbers(rank, count, dtype, seed);
      for (int64_t i = 0; i < count; ++i) sum[i] += part[i];
    }
    for (int64_t i = 0; i < count; ++i) {
      const float value = residual == nullptr ? sum[i] : sum[i] + (*residual)[i];
      sum[i] = dtype == DType::kBF16  ? ToFloat(ToBF16(value))
               : dtype == DType::kF16 ? ToFloat(ToF16(value))
                                      : value;
    }
    return sum;
  }
  static void ExpectSame(const std::vector<float>& got, const std::vector<float>& expected,
                         const std::string& what) {
    ASSERT_EQ(got.size(), expected.size());
    for (size_t i = 0; i < got.size(); ++i) {
      ASSERT_EQ(got[i], expected[i]) << "rank " << job->rank() << ", " << what << ", element " << i;
    }
  }

  int num_multiprocessors_ = 0;
  OwnedCudaStream stream_;
  std::unique_ptr<CudaLinear> linear_;
  std::unique_ptr<PeerWindows> peers_;
};

}  // namespace lockstep
