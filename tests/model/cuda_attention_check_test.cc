#include "model/cuda_attention_check.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "tests/model/cuda_test_util.h"

namespace lockstep {
namespace {

class CompareRowsTest : public CudaTest {
 protected:
  static constexpr int64_t kRows = 5, kCols = 700;

  // Both sides as they go to the device; the differences as they come back.
  std::vector<CudaRowDifference> Compare(const std::vector<float>& values,
                                         const std::vector<float>& expected, DType dtype) {
    const DeviceBuffer mine = Upload(values, dtype), other = Upload(expected, dtype);
    auto on_device = DeviceBuffer::Create(kRows * sizeof(CudaRowDifference), "differences");
    EXPECT_TRUE(on_device.ok());
    EXPECT_STATUS_OK(CompareRows({mine.data(), dtype, kRows, kCols, kCols},
                                 {other.data(), dtype, kRows, kCols, kCols},
                                 on_device->as<CudaRowDifference>(), Context()));
    std::vector<CudaRowDifference> differences(kRows);
    EXPECT_STATUS_OK(
        CopyAsync(differences.data(), on_device->data(), on_device->size_bytes(), stream()));
    EXPECT_STATUS_OK(Synchronize(stream()));
    return differences;
  }

 private:
  DeviceBuffer Upload(const std::vector<float>& values, DType dtype) {
    std::vector<char> bytes(values.size() * SizeOf(dtype));
    Convert(DType::kF32, values.data(), dtype, bytes.data(), std::ssize(values));
    auto buffer = DeviceBuffer::Create(std::ssize(bytes), "rows");
    EXPECT_TRUE(buffer.ok());
    EXPECT_STATUS_OK(CopyAsync(buffer->data(), bytes.data(), std::ssize(bytes), stream()));
    EXPECT_STATUS_OK(Synchronize(stream()));
    return *std::move(buffer);
  }
};

TEST_F(CompareRowsTest, FindsTheLargestOfEachRow) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    std::mt19937 random(1);
    std::uniform_int_distribution<int> eighths(-16, 16);  // exact in every dtype
    std::vector<float> expected(kRows * kCols);
    for (float& value : expected) value = static_cast<float>(eighths(random)) / 8;
    for (int64_t row = 0; row < kRows; ++row) expected[row * kCols + 5] = -4;  // the largest
    std::vector<float> values = expected;
    values[0 * kCols + 699] += 1;
    values[1 * kCols + 300] -= 0.5f;
    values[1 * kCols + 301] += 0.25f;
    values[2 * kCols + 0] = NAN;
    values[3 * kCols + 9] = expected[3 * kCols + 9] = NAN;
    const std::vector<CudaRowDifference> differences = Compare(values, expected, dtype);
    EXPECT_EQ(differences[0].relative, 0.25f);
    EXPECT_EQ(differences[0].column, 699);
    EXPECT_EQ(differences[0].value, values[699]);
    EXPECT_EQ(differences[0].expected, expected[699]);
    EXPECT_EQ(differences[1].relative, 0.125f);
    EXPECT_EQ(differences[1].column, 300);
    EXPECT_EQ(differences[2].relative, INFINITY);
    EXPECT_EQ(differences[2].column, 0);
    EXPECT_EQ(differences[3].relative, 0);
    EXPECT_EQ(differences[4].relative, 0);
  }
}

}  // namespace
}  // namespace lockstep
