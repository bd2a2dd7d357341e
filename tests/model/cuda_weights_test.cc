// Weights on their way to the GPU: what arrives is what the checkpoint reads on the host, bit for
// bit, whatever the stored type, the rectangle and the number of threads.
#include "model/cuda_weights.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "model/checkpoint/dummy.h"
#include "model/checkpoint/safetensors.h"
#include "model/checkpoint/tensor_names.h"
#include "tests/checkpoint/test_files.h"

namespace lockstep {
namespace {

constexpr DType kTypes[] = {DType::kF32, DType::kBF16, DType::kF16};

// Unlike CudaTest, without anything that multiplies.
class CudaWeightsTest : public testing::Test {
 protected:
  void SetUp() override {
    if (NumCudaDevices() == 0) GTEST_SKIP() << "no GPU is visible";
    ASSERT_TRUE(SelectCudaDevice(0).ok());
    auto stream = OwnedCudaStream::Create();
    ASSERT_TRUE(stream.ok()) << stream.status();
    stream_ = *std::move(stream);
  }

  std::string Bits(const DeviceMatrix& matrix) {
    std::string bits(static_cast<size_t>(matrix.bytes()), '\0');
    EXPECT_TRUE(CopyAsync(bits.data(), matrix.storage.data(), matrix.bytes(), stream_.get()).ok());
    EXPECT_TRUE(Synchronize(stream_.get()).ok());
    return bits;
  }
  static std::string OnHost(const Checkpoint& checkpoint, const std::vector<Rectangle>& parts,
                            DType dtype) {
    std::string bits;
    for (const Rectangle& part : parts) {
      const int64_t rows = part.rows.size(), cols = part.cols.size();
      std::string some(static_cast<size_t>(rows * cols * SizeOf(dtype)), '\0');
      const absl::Status read =
          checkpoint.Read(part.name, part.rows, part.cols, {some.data(), dtype, rows, cols, cols});
      EXPECT_TRUE(read.ok()) << read;
      bits += some;
    }
    return bits;
  }
  // Several matrices at once, as a decoder loads them.
  void ExpectAsOnHost(const Checkpoint& checkpoint, const std::vector<std::vector<Rectangle>>& all,
                      DType dtype, int num_threads) {
    ThreadPool threads(num_threads);
    DeviceWeightLoader loader(checkpoint, threads, stream_.get());
    std::vector<DeviceMatrix> matrices;
    for (const std::vector<Rectangle>& parts : all) {
      auto matrix = loader.Load(parts, dtype);
      ASSERT_TRUE(matrix.ok()) << matrix.status();
      matrices.push_back(*std::move(matrix));
    }
    const absl::Status finished = loader.Finish();
    ASSERT_TRUE(finished.ok()) << finished;
    for (size_t i = 0; i < all.size(); ++i) {
      EXPECT_TRUE(Bits(matrices[i]) == OnHost(checkpoint, all[i], dtype))
          << all[i][0].name << " as " << Name(dtype) << ", " << num_threads << " threads";
    }
  }

  OwnedCudaStream stream_;
};

ModelConfig Config() {
  ModelConfig config;
  config.model_type = "llama";
  config.hidden_size = 96;
  config.intermediate_size = 200;
  config.num_layers = 1;
  config.num_query_heads = 6;
  config.num_kv_heads = 3;
  config.head_dim = 16;
  config.vocab_size = 1001;
  config.max_position_embeddings = 64;
  config.layer_windows = {0};
  config.dtype = DType::kF32;
  return config;
}

TEST_F(CudaWeightsTest, MadeUpWeightsAreThoseOfTheHost) {
  const auto checkpoint = MakeDummyCheckpoint("DIR", Config());
  const std::string q = LayerTensor(0, kQWeight), down = LayerTensor(0, kDownWeight);
  for (const DType dtype : kTypes) {
    ExpectAsOnHost(*checkpoint,
                   {{{kEmbedTokens, {0, 1001}, {0, 96}}},
                    {{kEmbedTokens, {77, 1000}, {0, 96}}},
                    {{q, {0, 96}, {0, 96}}, {LayerTensor(0, kKWeight), {16, 48}, {0, 96}}},
                    {{down, {0, 96}, {100, 200}}},  // 100 columns: no multiple of 8
                    {{down, {3, 50}, {8, 136}}},
                    {{kFinalNorm, {0, 1}, {0, 96}}}},
                   dtype, 1);
  }
}

// A file with one matrix and one vector of each type; large enough for several pieces a thread.
class StoredWeightsTest : public CudaWeightsTest {
 protected:
  static constexpr int64_t kRows = 5000, kCols = 1536, kOddCols = 1027;

  void SetUp() override {
    CudaWeightsTest::SetUp();
    if (stream_.get() == nullptr) return;
    std::map<std::string, StoredTensor> tensors;
    std::mt19937 random(3);
    std::normal_distribution<float> normal;
    for (const auto& [type, dtype] : {std::pair<std::string, DType>{"F32", DType::kF32},
                                      {"F16", DType::kF16},
                                      {"BF16", DType::kBF16}}) {
      for (const auto& [name, rows, cols] :
           {std::tuple<std::string, int64_t, int64_t>{"matrix", kRows, kCols},
            {"odd", 333, kOddCols},
            {"vector", 1, kCols}}) {
        std::vector<float> values(static_cast<size_t>(rows * cols));
        for (float& value : values) value = normal(random);
        std::string bytes(values.size() * SizeOf(dtype), '\0');
        Convert(DType::kF32, values.data(), dtype, bytes.data(), std::ssize(values));
        std::vector<int64_t> shape = {rows, cols};
        if (rows == 1) shape = {cols};
        tensors[name + type] = {type, shape, bytes};
      }
    }
    const std::string path = folder_ / "model.safetensors";
    WriteFile(path, SafetensorsBytes(tensors));
    auto checkpoint = OpenSafetensors(path);
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
    checkpoint_ = *std::move(checkpoint);
  }

  TempFolder folder_;
  std::unique_ptr<Checkpoint> checkpoint_;
};

TEST_F(StoredWeightsTest, ReadWeightsAreThoseOfTheHost) {
  for (const std::string type : {"F32", "F16", "BF16"}) {
    for (const DType dtype : kTypes) {
      for (const int num_threads : {1, 3, 16}) {
        ExpectAsOnHost(*checkpoint_,
                       {{{"matrix" + type, {0, kRows}, {0, kCols}}},
                        {{"matrix" + type, {1, 4000}, {0, kCols}},
                         {"matrix" + type, {4999, 5000}, {0, kCols}}},
                        {{"matrix" + type, {0, kRows}, {700, 1536}}},
                        {{"odd" + type, {0, 333}, {0, kOddCols}}},
                        {{"odd" + type, {5, 300}, {1, 1000}}},
                        {{"vector" + type, {0, 1}, {13, 900}}}},
                       dtype, num_threads);
      }
    }
  }
}

TEST_F(StoredWeightsTest, VectorsLieOneBehindTheOther) {
  ThreadPool threads(2);
  DeviceWeightLoader loader(*checkpoint_, threads, stream_.get());
  const std::vector<Rectangle> parts = {{"vectorBF16", {0, 1}, {3, 10}},
                                        {"vectorF16", {0, 1}, {0, kCols}}};
  auto vector = loader.LoadVector(parts, DType::kF32);
  ASSERT_TRUE(vector.ok()) << vector.status();
  ASSERT_TRUE(loader.Finish().ok());
  EXPECT_EQ(vector->view.cols, 7 + kCols);
  EXPECT_TRUE(Bits(*vector) == OnHost(*checkpoint_, parts, DType::kF32));
}

TEST_F(StoredWeightsTest, AFailedReadEndsTheLoad) {
  ThreadPool threads(4);
  DeviceWeightLoader loader(*checkpoint_, threads, stream_.get());
  auto matrix = loader.Load({{"matrixF32", {0, kRows}, {0, kCols}}}, DType::kBF16);
  ASSERT_TRUE(matrix.ok()) << matrix.status();
  // The file is cut short after it was opened.
  std::filesystem::resize_file(folder_ / "model.safetensors", 1 << 20);
  const absl::Status finished = loader.Finish();
  EXPECT_EQ(finished.code(), absl::StatusCode::kFailedPrecondition) << finished;
  EXPECT_NE(finished.ToString().find("is shorter now"), std::string::npos) << finished;
}

TEST_F(CudaWeightsTest, WhatDoesNotFitFloat16IsRefused) {
  const TempFolder folder;
  const float large[] = {1.0f, 70000.0f};
  const std::string bytes(reinterpret_cast<const char*>(large), sizeof(large));
  WriteFile(folder / "model.safetensors", SafetensorsBytes({{"matrix", {"F32", {1, 2}, bytes}}}));
  auto checkpoint = OpenSafetensors(folder / "model.safetensors");
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  ThreadPool threads(1);
  DeviceWeightLoader loader(**checkpoint, threads, stream_.get());
  const auto matrix = loader.Load({{"matrix", {0, 1}, {0, 2}}}, DType::kF16);
  ASSERT_TRUE(matrix.ok()) << matrix.status();
  const absl::Status finished = loader.Finish();
  EXPECT_NE(finished.ToString().find("does not fit float16"), std::string::npos) << finished;
}

}  // namespace
}  // namespace lockstep
