// Matrices in device memory whose elements a test sets and reads as double, and what the tests of
// operators on GPUs share.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "model/cuda_ops.h"
#include "runtime/core/buffer.h"
#include "runtime/core/cuda_device.h"
#include "runtime/core/dtype.h"

namespace lockstep {

inline double LoadElement(DType dtype, const void* data, int64_t i) {
  switch (dtype) {
    case DType::kF32:
      return static_cast<const float*>(data)[i];
    case DType::kF16:
      return ToFloat(static_cast<const F16*>(data)[i]);
    case DType::kBF16:
      return ToFloat(static_cast<const BF16*>(data)[i]);
    case DType::kF8E4M3:
      return ToFloat(static_cast<const F8E4M3*>(data)[i]);
  }
  return NAN;
}

inline void StoreElement(DType dtype, void* data, int64_t i, float value) {
  switch (dtype) {
    case DType::kF32:
      static_cast<float*>(data)[i] = value;
      return;
    case DType::kF16:
      static_cast<F16*>(data)[i] = ToF16(value);
      return;
    case DType::kBF16:
      static_cast<BF16*>(data)[i] = ToBF16(value);
      return;
    case DType::kF8E4M3:
      static_cast<F8E4M3*>(data)[i] = ToF8E4M3(value);
      return;
  }
}

// Largest error of one rounding to it, relative.
inline double RoundingOf(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return 1.0 / 16777216;
    case DType::kF16:
      return 1.0 / 2048;
    case DType::kBF16:
      return 1.0 / 256;
    case DType::kF8E4M3:
      return 1.0 / 16;
  }
  return 0;
}

// The same matrix on the host and on the device. There is room to the right of its columns, in
// front of it (`offset` elements, so that it need not be aligned) and behind it, all NaN, that no
// operator may touch.
class CudaMatrix {
 public:
  CudaMatrix(int64_t rows, int64_t cols, DType dtype, int64_t gap = 0, int64_t offset = 0)
      : dtype_(dtype), rows_(rows), cols_(cols), stride_(cols + gap), offset_(offset) {
    host_.assign((offset_ + rows_ * stride_ + kBehind) * SizeOf(dtype_), static_cast<char>(0xff));
    auto device = DeviceBuffer::Create(static_cast<int64_t>(host_.size()), "a test's matrix");
    EXPECT_TRUE(device.ok()) << device.status();
    if (device.ok()) device_ = *std::move(device);
    Upload(nullptr);
  }

  int64_t rows() const { return rows_; }
  int64_t cols() const { return cols_; }
  DType dtype() const { return dtype_; }
  MatrixView view() const {
    return {device_.as<char>() + offset_ * SizeOf(dtype_), dtype_, rows_, cols_, stride_};
  }
  const float* f32() const { return static_cast<const float*>(view().data); }

  double At(int64_t r, int64_t c) const {
    return LoadElement(dtype_, host_.data(), offset_ + r * stride_ + c);
  }
  void Set(int64_t r, int64_t c, double value) {
    StoreElement(dtype_, host_.data(), offset_ + r * stride_ + c, static_cast<float>(value));
  }
  // Normal numbers around `mean`, on the host and on the device.
  void Fill(uint32_t seed, CudaStream stream, float scale = 1, float mean = 0) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal(mean, scale);
    for (int64_t r = 0; r < rows_; ++r) {
      for (int64_t c = 0; c < cols_; ++c) Set(r, c, normal(random));
    }
    Upload(stream);
  }
  void Poison(CudaStream stream) {
    std::memset(host_.data(), 0xff, host_.size());
    Upload(stream);
  }
  void Upload(CudaStream stream) { Copy(device_.data(), host_.data(), stream); }
  // Waits for the stream, and checks that nothing around the matrix was written.
  void Download(CudaStream stream) {
    Copy(host_.data(), device_.data(), stream);
    int64_t touched = 0;
    const int64_t count = static_cast<int64_t>(host_.size()) / SizeOf(dtype_);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t inside = i - offset_;
      if (inside >= 0 && inside < rows_ * stride_ && inside % stride_ < cols_) continue;
      if (!std::isnan(LoadElement(dtype_, host_.data(), i))) ++touched;
    }
    EXPECT_EQ(touched, 0) << "elements around the matrix were written";
  }
  // The bytes of a row, as downloaded.
  std::string RowBits(int64_t r) const {
    return {host_.data() + (offset_ + r * stride_) * SizeOf(dtype_),
            static_cast<size_t>(cols_ * SizeOf(dtype_))};
  }
  std::string Bits() const {
    std::string bits;
    for (int64_t r = 0; r < rows_; ++r) bits += RowBits(r);
    return bits;
  }

 private:
  static constexpr int64_t kBehind = 8;

  void Copy(void* to, const void* from, CudaStream stream) {
    absl::Status status = CopyAsync(to, from, static_cast<int64_t>(host_.size()), stream);
    if (status.ok()) status = Synchronize(stream);
    EXPECT_TRUE(status.ok()) << status;
  }

  DType dtype_;
  int64_t rows_, cols_, stride_, offset_;
  std::vector<char> host_;
  DeviceBuffer device_;
};

// Integers on the device.
template <typename T>
class CudaArray {
 public:
  CudaArray(const std::vector<T>& values, CudaStream stream) {
    const int64_t bytes = static_cast<int64_t>(values.size() * sizeof(T));
    auto device = DeviceBuffer::Create(bytes, "a test's indices");
    EXPECT_TRUE(device.ok()) << device.status();
    if (!device.ok()) return;
    device_ = *std::move(device);
    EXPECT_TRUE(CopyAsync(device_.data(), values.data(), bytes, stream).ok());
    EXPECT_TRUE(Synchronize(stream).ok());
  }
  const T* get() const { return device_.as<const T>(); }

 private:
  DeviceBuffer device_;
};
using CudaIndices = CudaArray<int32_t>;
using CudaSlots = CudaArray<int64_t>;

// Skips, saying so, where there is no GPU.
class CudaTest : public testing::Test {
 protected:
  void SetUp() override {
    if (NumCudaDevices() == 0) GTEST_SKIP() << "no GPU is visible";
    const auto info = SelectCudaDevice(0);
    ASSERT_TRUE(info.ok()) << info.status();
    num_multiprocessors_ = info->num_multiprocessors;
    auto stream = OwnedCudaStream::Create();
    ASSERT_TRUE(stream.ok()) << stream.status();
    stream_ = *std::move(stream);
    auto linear = CudaLinear::Create();
    ASSERT_TRUE(linear.ok()) << linear.status();
    linear_ = *std::move(linear);
  }
  void TearDown() override {
    if (linear_ == nullptr) return;
    const absl::Status status = Synchronize(stream());
    EXPECT_TRUE(status.ok()) << status;
  }

  CudaStream stream() const { return stream_.get(); }
  CudaLinear& linear() { return *linear_; }
  CudaContext Context(bool programmatic_launch = false) {
    return {stream(), num_multiprocessors_, *linear_, programmatic_launch};
  }

  int num_multiprocessors_ = 0;
  OwnedCudaStream stream_;
  std::unique_ptr<CudaLinear> linear_;
};

#define EXPECT_STATUS_OK(call)         \
  do {                                 \
    const absl::Status s = (call);     \
    EXPECT_TRUE(s.ok()) << #call << s; \
  } while (false)

}  // namespace lockstep
