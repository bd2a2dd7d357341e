// Poison and copies of blocks of a pool on a CUDA device. Skipped where there is no device.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "cache/kv_pool.h"
#include "tests/attention/cuda_test_device.h"

namespace lockstep {
namespace {

class CudaPoolTest : public testing::TestWithParam<DType> {
 protected:
  void SetUp() override {
    if (NumCudaDevices() == 0) GTEST_SKIP() << "no CUDA device";
    ASSERT_TRUE(SelectCudaDevice(0).ok());
  }
};

TEST_P(CudaPoolTest, PoisonAndCopyTakeTheBlockOfEveryLayer) {
  constexpr int64_t kLayers = 3, kBlocks = 5, kElements = 2 * 4 * 8;
  auto stream = OwnedCudaStream::Create();
  ASSERT_TRUE(stream.ok()) << stream.status();
  const KvPoolShape shape = {.num_layers = kLayers,
                             .num_kv_heads = 2,
                             .head_dim = 8,
                             .block_size = 4,
                             .dtype = GetParam()};
  auto pool = KvPool::CreateOnCuda(shape, kBlocks, stream->get());
  ASSERT_TRUE(pool.ok()) << pool.status();
  const int64_t bytes = shape.BytesPerBlock() * kBlocks;
  ASSERT_EQ(bytes, 2 * kLayers * kBlocks * kElements * SizeOf(GetParam()));
  // Block b of every layer holds the number b.
  std::vector<float> numbers(2 * kLayers * kBlocks * kElements);
  for (size_t i = 0; i < numbers.size(); ++i) {
    numbers[i] = static_cast<float>(i / kElements % kBlocks);
  }
  std::vector<char> stored(bytes);
  Convert(DType::kF32, numbers.data(), GetParam(), stored.data(), std::ssize(numbers));
  const DeviceBuffer from = ToDevice(stored);
  ASSERT_TRUE(CopyAsync(pool->Layer(0).keys, from.data(), bytes, stream->get()).ok());
  ASSERT_TRUE(pool->Copy(2, 0).ok());
  ASSERT_TRUE(pool->Poison(3).ok());
  ASSERT_TRUE(pool->Copy(3, 1).ok());
  ASSERT_TRUE(CopyAsync(stored.data(), pool->Layer(0).keys, bytes, stream->get()).ok());
  ASSERT_TRUE(Synchronize(stream->get()).ok());
  Convert(GetParam(), stored.data(), DType::kF32, numbers.data(), std::ssize(numbers));
  for (size_t i = 0; i < numbers.size(); ++i) {
    const int64_t block = static_cast<int64_t>(i) / kElements % kBlocks;
    if (block == 1 || block == 3) {
      ASSERT_TRUE(std::isnan(numbers[i])) << i;
    } else {
      ASSERT_EQ(numbers[i], block == 0 ? 2 : static_cast<float>(block)) << i;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(DTypes, CudaPoolTest,
                         testing::Values(DType::kF32, DType::kF16, DType::kBF16, DType::kF8E4M3),
                         [](const auto& info) { return std::string(Name(info.param)); });

}  // namespace
}  // namespace lockstep
