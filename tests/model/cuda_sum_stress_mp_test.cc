// Many sums over ranks in a row, of both forms and all sizes, while ranks lag behind each other at
// random and what may be overwritten is, at once. Nothing on the host waits between sums.
#include <cuda_runtime.h>
#include <unistd.h>

#include <functional>
#include <map>
#include <random>
#include <utility>

#include "tests/model/cuda_spin.h"
#include "tests/model/cuda_sum_fixture.h"

namespace lockstep {
namespace {

class SumStressTest : public SumTest, public testing::WithParamInterface<bool> {
 protected:
  static constexpr int64_t kCols = 512, kMaxRows = 200, kInputs = 16;
  static constexpr int64_t kBytes = kMaxRows * kCols * 2;
  static constexpr DType kType = DType::kBF16;

  // What was summed, and where the results are: of sums in `residual`, of norms in `out`.
  struct Made {
    SumPath path;
    int64_t rows;
    int64_t input;
    bool chosen;  // rows of chosen_ in turn
    const char* residual;
    const char* out;
  };

  void SetUp() override {
    SumTest::SetUp();
    if (peers_ == nullptr) return;
    weight_ = Device(Numbers(0, kCols, DType::kF32, kResidualSeed), DType::kF32);
    lag_ = VALUE_OR_ABORT(DeviceBuffer::Create(int64_t{64} << 20, "something to do"));
    for (int64_t r = 0; r < kMaxRows; ++r) {
      chosen_.push_back(static_cast<int32_t>(r % 2 == 0 ? r / 2 : kMaxRows - 1 - r));
    }
    device_chosen_ = Device(chosen_);
    const DeviceBuffer residual = VALUE_OR_ABORT(DeviceBuffer::Create(kBytes, "residual"));
    const DeviceBuffer out = VALUE_OR_ABORT(DeviceBuffer::Create(kBytes, "out"));
    for (uint32_t i = 0; i < kInputs; ++i) {
      parts_.push_back(Device(Numbers(job->rank(), kMaxRows * kCols, kType, i), kType));
      sums_.push_back(Sum(kMaxRows * kCols, kType, i, nullptr));
      // A row's norm depends on the row alone: those of the largest sum, one at a time.
      SumOnce(SumPath::kOneShot, kMaxRows, i, i % 2, false, residual.data(), out.data());
      norms_.push_back(Host(out.data(), kMaxRows * kCols, kType));
    }
    random_.seed(4711);  // what all ranks do alike
    lagging_.seed(99 + job->rank());
  }

  // One sum into residual and out (of kMaxRows rows each), from window `window`. `chosen`: out is
  // the norm of chosen rows, as many as there are rows.
  Made SumOnce(SumPath path, int64_t rows, int64_t input, int window, bool chosen, void* residual,
               void* out, int max_blocks = kMaxPeerBlocks) {
    const int64_t bytes = rows * kCols * 2;
    const bool two_shot = path == SumPath::kTwoShot;
    OR_ABORT(CopyAsync(peers_->window(window), parts_[input].data(), bytes, stream()));
    // Any other window takes the chosen rows, even that of the sum before.
    const int other = (window + 1 + static_cast<int>(rows % 2)) % PeerWindows::kNumWindows;
    const int result = chosen ? other : window;
    void* const to = two_shot ? peers_->window(result) : out;
    const PeerSum sum = {.path = path,
                         .window = window,
                         .rows = {0, rows},
                         .use = ResidualUse::kReplace,
                         .wanted = chosen ? device_chosen_.as<const int32_t>() : nullptr,
                         .max_blocks = max_blocks};
    OR_ABORT(SumAddRmsNorm(*peers_, sum, {residual, kType, rows, kCols, kCols},
                           weight_.as<const float>(), kSumEps, {to, kType, rows, kCols, kCols},
                           Context(GetParam())));
    if (two_shot) OR_ABORT(CopyAsync(out, to, bytes, stream()));
    // A one-shot sum before this one has ended everywhere; a two-shot sum has when it ends here.
    if (last_window_ >= 0) Poison(last_window_);
    last_window_ = two_shot ? -1 : window;
    if (two_shot) {
      Poison(result);
      Poison(window);
    }
    return {path,
            rows,
            input,
            chosen,
            static_cast<const char*>(residual),
            static_cast<const char*>(out)};
  }
  void Poison(int window) {
    OR_ABORT(FillBytesAsync(peers_->window(window), 0xff, kBytes, stream()));
  }
  // Now and then this rank, or its GPU, is late: idle, or busy with its memory.
  void Lag() {
    if (lagging_() % 8 == 0) usleep(lagging_() % 300);
    if (lagging_() % 8 == 0) OR_ABORT(SpinOnDevice(lagging_() % 200000, stream()));
    if (lagging_() % 8 == 0) {
      OR_ABORT(FillBytesAsync(lag_.data(), 1, lagging_() % lag_.size_bytes(), stream()));
    }
  }
  SumPath AnyPath() { return random_() % 2 == 0 ? SumPath::kOneShot : SumPath::kTwoShot; }
  // Mostly all, at times few, which then take many rows each.
  int AnyNumberOfBlocks() {
    return random_() % 4 == 0 ? 1 + static_cast<int>(random_() % 9) : kMaxPeerBlocks;
  }

  // Waits for the device. The job ends where a sum is wrong.
  void Check(const Made& made, const std::string& what) {
    std::vector<float> sum = sums_[made.input];
    sum.resize(made.rows * kCols);
    const auto is_own = [&](int64_t row) {
      return !made.chosen &&
             (made.path == SumPath::kOneShot || RankOfSumRow(row, job->size()) == job->rank());
    };
    const std::vector<float> residual = Host(made.residual, made.rows * kCols, kType);
    const std::vector<float> out = Host(made.out, made.rows * kCols, kType);
    const std::string where =
        absl::StrFormat("%s, %d rows, %s, chosen rows %d", what, made.rows,
                        made.path == SumPath::kTwoShot ? "two-shot" : "one-shot", made.chosen);
    const char* wrong = nullptr;
    for (int64_t i = 0; i < made.rows * kCols && wrong == nullptr; ++i) {
      const int64_t row = i / kCols;
      if (is_own(row) ? residual[i] != sum[i] : !std::isnan(residual[i])) {
        wrong = is_own(row) ? "the residual stream" : "another rank's row of the residual stream";
      }
      // Chosen rows that are beyond this sum's are nobody's.
      const int64_t out_row = made.chosen ? chosen_[row] : row;
      if (out_row < made.rows && out[i] != norms_[made.input][out_row * kCols + i % kCols]) {
        wrong = "the norm";
      }
      if (wrong != nullptr) {
        OR_ABORT(absl::InternalError(
            absl::StrFormat("wrong: %s of %s, row %d, column %d", wrong, where, row, i % kCols)));
      }
    }
  }

  std::vector<DeviceBuffer> parts_;
  std::vector<std::vector<float>> sums_, norms_;
  std::vector<int32_t> chosen_;
  DeviceBuffer device_chosen_, weight_, lag_;
  std::mt19937 random_, lagging_;
  int last_window_ = -1;  // that may not be written yet
};

TEST_P(SumStressTest, ManySumsWhileRanksLag) {
  constexpr int kBatch = 64;
  DeviceBuffer residuals = VALUE_OR_ABORT(DeviceBuffer::Create(kBatch * kBytes, "residuals"));
  DeviceBuffer outs = VALUE_OR_ABORT(DeviceBuffer::Create(kBatch * kBytes, "outs"));
  const int num_batches = OnOneGpu() ? 2 : 40;
  for (int batch = 0; batch < num_batches; ++batch) {
    std::vector<Made> made;
    OR_ABORT(FillBytesAsync(residuals.data(), 0xff, residuals.size_bytes(), stream()));
    for (int i = 0; i < kBatch; ++i) {
      // Mostly few rows, at times more than blocks.
      const int64_t rows = 1 + random_() % (random_() % 4 == 0 ? kMaxRows : 8);
      const int64_t input = random_() % kInputs;
      int window = static_cast<int>(random_() % PeerWindows::kNumWindows);
      if (window == last_window_) window = (window + 1) % PeerWindows::kNumWindows;
      const SumPath path = AnyPath();
      const bool chosen = random_() % 8 == 0;
      Lag();
      made.push_back(SumOnce(path, rows, input, window, chosen, residuals.as<char>() + i * kBytes,
                             outs.as<char>() + i * kBytes, AnyNumberOfBlocks()));
    }
    for (int i = 0; i < kBatch; ++i) Check(made[i], absl::StrFormat("sum %d of %d", i, batch));
  }
}

// Steps of an odd number of sums, the last of chosen rows, in the windows that the decoder takes.
// Each batch size has one path, as there: a graph and an eager step do the same.
class SumStepTest : public SumStressTest {
 protected:
  static constexpr int kLayers = 3, kSums = 2 * kLayers + 1;

  void SetUp() override {
    SumStressTest::SetUp();
    if (peers_ == nullptr) return;
    residuals_ = VALUE_OR_ABORT(DeviceBuffer::Create(kSums * kBytes, "residuals"));
    outs_ = VALUE_OR_ABORT(DeviceBuffer::Create(kSums * kBytes, "outs"));
  }
  std::vector<Made> Step(SumPath path, int64_t rows) {
    std::vector<Made> made;
    for (int i = 0; i < kSums; ++i) {
      made.push_back(SumOnce(path, rows, i, WindowOfSum(i, kLayers), i == kSums - 1,
                             residuals_.as<char>() + i * kBytes, outs_.as<char>() + i * kBytes));
    }
    return made;
  }
  // The step behind the last does not know what that was: its window is free again.
  cudaGraphExec_t Capture(SumPath path, int64_t rows) {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    EXPECT_EQ(cudaStreamBeginCapture(stream(), cudaStreamCaptureModeThreadLocal), cudaSuccess);
    last_window_ = 2;
    Step(path, rows);
    EXPECT_EQ(cudaStreamEndCapture(stream(), &graph), cudaSuccess);
    EXPECT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
    EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
    return executable;
  }

  DeviceBuffer residuals_, outs_;
};

// A decode step of each batch size as a graph, and eager steps between them, in any order: what a
// serving engine does. Thousands of steps.
TEST_P(SumStepTest, StepsOfManySizesInRandomOrder) {
  constexpr std::pair<int64_t, SumPath> kSizes[] = {
      {1, SumPath::kOneShot},       {2, SumPath::kTwoShot},   {8, SumPath::kOneShot},
      {32, SumPath::kTwoShot},      {130, SumPath::kOneShot}, {131, SumPath::kTwoShot},
      {kMaxRows, SumPath::kTwoShot}};
  const int num_steps = OnOneGpu() ? 30 : 2500;
  for (const auto& [rows, path] : kSizes) Step(path, rows);  // kernels are loaded
  OR_ABORT(Synchronize(stream()));
  std::map<int64_t, cudaGraphExec_t> graphs;
  for (const auto& [rows, path] : kSizes) graphs[rows] = Capture(path, rows);
  for (int s = 0; s < num_steps; ++s) {
    const auto [rows, path] = kSizes[random_() % std::size(kSizes)];
    const bool eager = random_() % 4 == 0;
    Lag();
    OR_ABORT(FillBytesAsync(residuals_.data(), 0xff, residuals_.size_bytes(), stream()));
    last_window_ = 2;
    if (eager) {
      Step(path, rows);
    } else {
      ASSERT_EQ(cudaGraphLaunch(graphs[rows], stream()), cudaSuccess);
    }
    // The host reads one sum of every step, all of some steps; a step that is not read may overlap
    // the next.
    const int first = static_cast<int>(random_() % kSums);
    const int count = s % 16 == 0 ? kSums : s % 3 == 0 ? 0 : 1;
    for (int i = 0; i < count; ++i) {
      const int sum = (first + i) % kSums;
      Check({path, rows, sum, sum == kSums - 1, residuals_.as<char>() + sum * kBytes,
             outs_.as<char>() + sum * kBytes},
            absl::StrFormat("sum %d of step %d, eager %d", sum, s, eager));
    }
  }
  for (const auto& [rows, graph] : graphs) EXPECT_EQ(cudaGraphExecDestroy(graph), cudaSuccess);
}

const auto kLaunchName = [](const testing::TestParamInfo<bool>& info) {
  return info.param ? "programmatic" : "plain";
};
INSTANTIATE_TEST_SUITE_P(Launches, SumStressTest, testing::Bool(), kLaunchName);
INSTANTIATE_TEST_SUITE_P(Launches, SumStepTest, testing::Bool(), kLaunchName);

}  // namespace
}  // namespace lockstep
