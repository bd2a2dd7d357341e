// The sum over ranks in one kernel, under mpirun with a GPU a rank: against sums made on the host,
// bit for bit, and many of them in a row while ranks lag behind each other at random and what may
// be overwritten is.
#include <cuda_runtime.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <map>
#include <thread>

#include "model/cuda_sum.h"
#include "tests/model/cuda_spin.h"
#include "tests/parallel/gpu_job.h"

namespace lockstep {
namespace {

constexpr float kEps = 1e-5f;
constexpr int64_t kWindowBytes = int64_t{8} << 20;
constexpr uint32_t kResidualSeed = 77;  // the same on all ranks

float Rounded(float value, DType dtype) {
  return dtype == DType::kBF16  ? ToFloat(ToBF16(value))
         : dtype == DType::kF16 ? ToFloat(ToF16(value))
                                : value;
}

class SumTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!OnOneGpu() && !GpuForEveryRank()) GTEST_SKIP() << "fewer GPUs than ranks";
    num_multiprocessors_ = VALUE_OR_ABORT(TakeGpu()).num_multiprocessors;
    stream_ = VALUE_OR_ABORT(OwnedCudaStream::Create());
    linear_ = VALUE_OR_ABORT(CudaLinear::Create());
    peers_ = VALUE_OR_ABORT(PeerWindows::Create(*job, kWindowBytes));
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
      sum[i] = Rounded(residual == nullptr ? sum[i] : sum[i] + (*residual)[i], dtype);
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
  // Row r of `out` is the norm of row rows[r] of `sum`.
  static void ExpectNorms(const std::vector<float>& out, const std::vector<float>& sum,
                          const std::vector<int32_t>& rows, const std::vector<float>& weight,
                          DType dtype);

  int num_multiprocessors_ = 0;
  OwnedCudaStream stream_;
  std::unique_ptr<CudaLinear> linear_;
  std::unique_ptr<PeerWindows> peers_;
};

void SumTest::ExpectNorms(const std::vector<float>& out, const std::vector<float>& sum,
                          const std::vector<int32_t>& rows, const std::vector<float>& weight,
                          DType dtype) {
  const int64_t cols = static_cast<int64_t>(weight.size());
  const double rounding = dtype == DType::kBF16  ? 1.0 / 256
                          : dtype == DType::kF16 ? 1.0 / 2048
                                                 : 1e-6;
  for (size_t r = 0; r < rows.size(); ++r) {
    const float* row = sum.data() + rows[r] * cols;
    double squares = 0;
    for (int64_t c = 0; c < cols; ++c) squares += double{row[c]} * row[c];
    const double scale = 1 / std::sqrt(squares / static_cast<double>(cols) + double{kEps});
    for (int64_t c = 0; c < cols; ++c) {
      const double expected = row[c] * scale * weight[c];
      ASSERT_NEAR(out[r * cols + c], expected, 1.01 * rounding * std::abs(expected) + 1e-6)
          << "row " << r << ", column " << c << " of " << cols;
    }
  }
}

TEST_F(SumTest, MatchesSumsOnTheHost) {
  uint32_t seed = 0;
  int window = 0;
  for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
    for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{1, 8},
                                     {1, 3584},
                                     {3, 576},
                                     {7, 4096},
                                     {130, 3584},
                                     {300, 64},
                                     {2, 8192}}) {
      ASSERT_TRUE(SumAddRmsNormSupports(cols, dtype));
      const int64_t count = rows * cols, bytes = count * SizeOf(dtype);
      const std::vector<float> before = Numbers(0, count, dtype, kResidualSeed);
      const std::vector<float> weight = Numbers(0, cols, DType::kF32, kResidualSeed);
      const DeviceBuffer device_weight = Device(weight, DType::kF32);
      const std::vector<int32_t> some = {static_cast<int32_t>(rows - 1), 0};
      const DeviceBuffer device_some = VALUE_OR_ABORT(DeviceBuffer::Create(8, "rows"));
      OR_ABORT(CopyAsync(device_some.data(), some.data(), 8, stream()));
      std::vector<int32_t> all(rows);
      for (int64_t r = 0; r < rows; ++r) all[r] = static_cast<int32_t>(r);
      for (const bool programmatic : {false, true}) {
        for (const int mode : {0, 1, 2}) {  // adds, replaces, some rows
          const DeviceBuffer residual = Device(before, dtype), out = Device(before, dtype);
          OR_ABORT(FillBytesAsync(out.data(), 0xff, bytes, stream()));
          const DeviceBuffer part = Device(Numbers(job->rank(), count, dtype, ++seed), dtype);
          window = (window + 1) % 2;
          OR_ABORT(CopyAsync(peers_->window(window), part.data(), bytes, stream()));
          const MatrixView residual_view = {residual.data(), dtype, rows, cols, cols};
          MatrixView out_view = {out.data(), dtype, rows, cols, cols};
          if (mode == 2) out_view.rows = std::min<int64_t>(rows, 2);
          OR_ABORT(SumAddRmsNorm(
              *peers_, window, mode == 1 ? ResidualUse::kReplace : ResidualUse::kAdd, residual_view,
              mode == 2 ? device_some.as<const int32_t>() : nullptr,
              device_weight.as<const float>(), kEps, out_view, Context(programmatic)));
          const std::vector<float> expected =
              Sum(count, dtype, seed, mode == 1 ? nullptr : &before);
          const std::string what = absl::StrFormat("%s [%d, %d], mode %d, programmatic %d",
                                                   Name(dtype), rows, cols, mode, programmatic);
          ExpectSame(Host(residual.data(), count, dtype), mode == 2 ? before : expected, what);
          std::vector<int32_t> out_rows = mode == 2 ? some : all;
          out_rows.resize(out_view.rows);
          SCOPED_TRACE(what);
          ExpectNorms(Host(out.data(), out_view.rows * cols, dtype), expected, out_rows, weight,
                      dtype);
        }
      }
    }
  }
}

// Nothing on the host waits between sums. Each sum reads a window that was filled in front of it,
// and what the rules allow to be overwritten is, at once, with NaN.
class SumStressTest : public SumTest, public testing::WithParamInterface<bool> {
 protected:
  static constexpr int64_t kCols = 512, kMaxRows = 200, kInputs = 16;
  static constexpr DType kType = DType::kBF16;

  void SetUp() override {
    SumTest::SetUp();
    if (peers_ == nullptr) return;
    for (uint32_t i = 0; i < kInputs; ++i) {
      parts_.push_back(Device(Numbers(job->rank(), kMaxRows * kCols, kType, i), kType));
      sums_.push_back(Sum(kMaxRows * kCols, kType, i, nullptr));
    }
    weight_ = Device(Numbers(0, kCols, DType::kF32, kResidualSeed), DType::kF32);
    lag_ = VALUE_OR_ABORT(DeviceBuffer::Create(int64_t{64} << 20, "something to do"));
    random_.seed(4711);  // what all ranks do alike
    lagging_.seed(99 + job->rank());
  }

  // Sum `input` of `rows` rows by window `window` into out and sums (of kMaxRows rows each).
  void SumOnce(int64_t rows, int64_t input, int window, void* residual, void* out) {
    const int64_t bytes = rows * kCols * 2;
    OR_ABORT(CopyAsync(peers_->window(window), parts_[input].data(), bytes, stream()));
    OR_ABORT(SumAddRmsNorm(
        *peers_, window, ResidualUse::kReplace, {residual, kType, rows, kCols, kCols}, nullptr,
        weight_.as<const float>(), kEps, {out, kType, rows, kCols, kCols}, Context(GetParam())));
    // The sum before this one has ended everywhere.
    if (last_window_ >= 0) {
      OR_ABORT(FillBytesAsync(peers_->window(last_window_), 0xff, kMaxRows * kCols * 2, stream()));
    }
    last_window_ = window;
  }
  // Now and then this rank, or its GPU, is late: idle, or busy with its memory.
  void Lag() {
    if (lagging_() % 8 == 0) usleep(lagging_() % 300);
    if (lagging_() % 8 == 0) OR_ABORT(SpinOnDevice(lagging_() % 200000, stream()));
    if (lagging_() % 8 == 0) {
      OR_ABORT(FillBytesAsync(lag_.data(), 1, lagging_() % lag_.size_bytes(), stream()));
    }
  }

  std::vector<DeviceBuffer> parts_;
  std::vector<std::vector<float>> sums_;
  DeviceBuffer weight_, lag_;
  std::mt19937 random_, lagging_;
  int last_window_ = -1;
};

TEST_P(SumStressTest, ManySumsWhileRanksLag) {
  constexpr int kBatch = 64;
  DeviceBuffer residuals =
      VALUE_OR_ABORT(DeviceBuffer::Create(kBatch * kMaxRows * kCols * 2, "residuals"));
  DeviceBuffer outs = VALUE_OR_ABORT(DeviceBuffer::Create(kBatch * kMaxRows * kCols * 2, "outs"));
  const int num_batches = OnOneGpu() ? 2 : 30;
  for (int batch = 0; batch < num_batches; ++batch) {
    std::vector<std::pair<int64_t, int64_t>> made;  // rows, input
    OR_ABORT(FillBytesAsync(residuals.data(), 0xff, residuals.size_bytes(), stream()));
    for (int i = 0; i < kBatch; ++i) {
      // Mostly few rows, at times more than blocks.
      const int64_t rows = 1 + random_() % (random_() % 4 == 0 ? kMaxRows : 8);
      const int64_t input = random_() % kInputs;
      int window = static_cast<int>(random_() % PeerWindows::kNumWindows);
      if (window == last_window_) window = (window + 1) % PeerWindows::kNumWindows;
      Lag();
      const int64_t at = i * kMaxRows * kCols * 2;
      SumOnce(rows, input, window, residuals.as<char>() + at, outs.as<char>() + at);
      made.emplace_back(rows, input);
    }
    for (int i = 0; i < kBatch; ++i) {
      const auto [rows, input] = made[i];
      std::vector<float> expected = sums_[input];
      expected.resize(rows * kCols);
      ExpectSame(Host(residuals.as<char>() + i * kMaxRows * kCols * 2, rows * kCols, kType),
                 expected, absl::StrFormat("sum %d of batch %d, %d rows", i, batch, rows));
      if (HasFatalFailure()) OR_ABORT(absl::InternalError("wrong sums"));
    }
  }
}

TEST_P(SumStressTest, AGraphOfAnOddNumberOfSums) {
  constexpr int64_t kRows = 3, kCount = kRows * kCols;
  constexpr int kSums = 5;
  DeviceBuffer residuals = VALUE_OR_ABORT(DeviceBuffer::Create(kSums * kCount * 2, "residuals"));
  DeviceBuffer out = VALUE_OR_ABORT(DeviceBuffer::Create(kCount * 2, "out"));
  const auto step = [&] {
    for (int i = 0; i < kSums; ++i) {
      SumOnce(kRows, i, i == kSums - 1 ? 2 : i % 2, residuals.as<char>() + i * kCount * 2,
              out.data());
    }
  };
  step();  // kernels are loaded
  last_window_ = 2;
  OR_ABORT(Synchronize(stream()));
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  ASSERT_EQ(cudaStreamBeginCapture(stream(), cudaStreamCaptureModeThreadLocal), cudaSuccess);
  step();
  ASSERT_EQ(cudaStreamEndCapture(stream(), &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
  const int num_replays = OnOneGpu() ? 20 : 300;
  for (int replay = 0; replay < num_replays; ++replay) {
    Lag();
    OR_ABORT(FillBytesAsync(residuals.data(), 0xff, residuals.size_bytes(), stream()));
    ASSERT_EQ(cudaGraphLaunch(executable, stream()), cudaSuccess);
    if (replay % 10 != 9) continue;
    for (int i = 0; i < kSums; ++i) {
      std::vector<float> expected = sums_[i];
      expected.resize(kCount);
      ExpectSame(Host(residuals.as<char>() + i * kCount * 2, kCount, kType), expected,
                 absl::StrFormat("sum %d of replay %d", i, replay));
      if (HasFatalFailure()) OR_ABORT(absl::InternalError("wrong sums"));
    }
  }
  EXPECT_EQ(cudaGraphExecDestroy(executable), cudaSuccess);
  EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
}

// A decode step of each batch size as a graph, and eager steps between them, in any order: what a
// serving engine does. Thousands of steps of an odd number of sums, each compared at its end.
TEST_P(SumStressTest, StepsOfManySizesInRandomOrder) {
  constexpr int kSums = 7;
  constexpr int64_t kSizes[] = {1, 2, 8, 32, 130, kMaxRows};
  const int num_steps = OnOneGpu() ? 30 : 2000;
  constexpr int64_t kBytes = kMaxRows * kCols * 2;
  const DeviceBuffer residuals = VALUE_OR_ABORT(DeviceBuffer::Create(kSums * kBytes, "residuals"));
  const DeviceBuffer out = VALUE_OR_ABORT(DeviceBuffer::Create(kBytes, "out"));
  const auto step = [&](int64_t rows) {
    for (int i = 0; i < kSums; ++i) {
      SumOnce(rows, i, i == kSums - 1 ? 2 : i % 2, residuals.as<char>() + i * kBytes, out.data());
    }
  };
  step(1);  // kernels are loaded
  OR_ABORT(Synchronize(stream()));
  std::map<int64_t, cudaGraphExec_t> graphs;
  for (const int64_t rows : kSizes) {
    cudaGraph_t graph = nullptr;
    ASSERT_EQ(cudaStreamBeginCapture(stream(), cudaStreamCaptureModeThreadLocal), cudaSuccess);
    step(rows);
    ASSERT_EQ(cudaStreamEndCapture(stream(), &graph), cudaSuccess);
    ASSERT_EQ(cudaGraphInstantiate(&graphs[rows], graph, 0), cudaSuccess);
    EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
  }
  for (int s = 0; s < num_steps; ++s) {
    const int64_t rows = kSizes[random_() % std::size(kSizes)];
    const bool eager = random_() % 4 == 0;
    Lag();
    OR_ABORT(FillBytesAsync(residuals.data(), 0xff, residuals.size_bytes(), stream()));
    if (eager) {
      step(rows);
    } else {
      ASSERT_EQ(cudaGraphLaunch(graphs[rows], stream()), cudaSuccess);
    }
    // The host reads one sum of every step, all of some steps; a step that is not read may overlap
    // the next.
    const int first = static_cast<int>(random_() % kSums);
    const int count = s % 16 == 0 ? kSums : s % 3 == 0 ? 0 : 1;
    for (int i = 0; i < count; ++i) {
      const int sum = (first + i) % kSums;
      std::vector<float> expected = sums_[sum];
      expected.resize(rows * kCols);
      ExpectSame(Host(residuals.as<char>() + sum * kBytes, rows * kCols, kType), expected,
                 absl::StrFormat("sum %d of step %d, %d rows, eager %d", sum, s, rows, eager));
      if (HasFatalFailure()) OR_ABORT(absl::InternalError("wrong sums"));
    }
  }
  for (const auto& [rows, graph] : graphs) EXPECT_EQ(cudaGraphExecDestroy(graph), cudaSuccess);
}

INSTANTIATE_TEST_SUITE_P(Launches, SumStressTest, testing::Bool(),
                         [](const auto& info) { return info.param ? "programmatic" : "plain"; });

TEST_F(SumTest, AbortFreesWhoWaits) {
  const DeviceBuffer weight = Device(std::vector<float>(8, 1), DType::kF32);
  const DeviceBuffer residual = Device(std::vector<float>(8, 1), DType::kBF16);
  const MatrixView row = {residual.data(), DType::kBF16, 1, 8, 8};
  if (job->rank() > 0) {  // rank 0 never comes
    OR_ABORT(SumAddRmsNorm(*peers_, 0, ResidualUse::kAdd, row, nullptr, weight.as<const float>(),
                           kEps, row, Context(false)));
    std::thread watchdog([this] {
      usleep(200000);
      peers_->Abort();
    });
    OR_ABORT(Synchronize(stream()));
    watchdog.join();
  }
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) { return lockstep::RunJobTests(argc, argv); }
