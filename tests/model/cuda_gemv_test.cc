// Products of one row with what stands around them, against double precision.
#include "model/cuda_gemv.h"

#include <cuda_runtime.h>

#include "tests/model/cuda_test_util.h"

namespace lockstep {
namespace {

struct Case {
  int64_t outputs, k;
  DType dtype = DType::kBF16;
  DType out_dtype = DType::kBF16;
  GemvOutput output = GemvOutput::kStore;
  bool has_norm = false;
  bool has_bias = false;
  bool programmatic = false;
};

class GemvTest : public CudaTest {
 protected:
  void SetUp() override {
    CudaTest::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    auto gemv = Gemv::Create(num_multiprocessors_);
    ASSERT_TRUE(gemv.ok()) << gemv.status();
    gemv_ = *std::move(gemv);
  }
  void Check(const Case& c);

  std::optional<Gemv> gemv_;
};

// What the product takes: x, or its norm, rounded to its dtype.
std::vector<double> NormedRow(const CudaMatrix& x, const CudaMatrix& weight, bool has_norm,
                              double eps) {
  std::vector<double> row(x.cols());
  double squares = 0;
  for (int64_t i = 0; i < x.cols(); ++i) squares += x.At(0, i) * x.At(0, i);
  const double scale = 1 / std::sqrt(squares / static_cast<double>(x.cols()) + eps);
  for (int64_t i = 0; i < x.cols(); ++i) {
    row[i] = x.At(0, i) * (has_norm ? scale * weight.At(0, i) : 1);
  }
  return row;
}

void GemvTest::Check(const Case& c) {
  SCOPED_TRACE(absl::StrFormat("%d outputs of %d columns, %s to %s, output %d, norm %d, bias %d",
                               c.outputs, c.k, Name(c.dtype), Name(c.out_dtype),
                               static_cast<int>(c.output), c.has_norm, c.has_bias));
  constexpr double kEps = 1e-5;
  const bool swiglu = c.output == GemvOutput::kSwiGlu;
  const int64_t rows = c.outputs * (swiglu ? 2 : 1);
  CudaMatrix x(1, c.k, c.dtype), weight(rows, c.k, c.dtype), norm(1, c.k, DType::kF32);
  CudaMatrix bias(1, rows, c.out_dtype), y(1, c.outputs, c.out_dtype);
  x.Fill(31, stream());
  weight.Fill(32, stream(), 0.05f);
  norm.Fill(33, stream(), 0.2f, 1);
  bias.Fill(34, stream());
  std::vector<double> before(c.outputs);
  if (c.output == GemvOutput::kAdd) {
    y.Fill(35, stream());
    for (int64_t i = 0; i < c.outputs; ++i) before[i] = y.At(0, i);
  } else {
    y.Poison(stream());
  }
  const GemvOperands operands{.x = x.view(),
                              .norm_weight = c.has_norm ? norm.f32() : nullptr,
                              .norm_eps = kEps,
                              .weight = weight.view(),
                              .bias = c.has_bias ? bias.view().data : nullptr,
                              .output = c.output,
                              .y = y.view()};
  ASSERT_TRUE(Gemv::Supports(operands));
  EXPECT_STATUS_OK(gemv_->Run(operands, stream(), c.programmatic));
  y.Download(stream());

  const std::vector<double> row = NormedRow(x, norm, c.has_norm, kEps);
  const double x_rounding = c.has_norm ? 1.01 * RoundingOf(c.dtype) : 0;
  // p[r], and how far it may be off: x rounded behind its norm (independent errors: well within 6
  // of their standard deviations), products added in float32.
  const auto product = [&](int64_t r, double* tolerance) {
    double sum = c.has_bias ? bias.At(0, r) : 0, magnitude = std::abs(sum), squares = 0;
    for (int64_t i = 0; i < c.k; ++i) {
      const double term = row[i] * weight.At(r, i);
      sum += term;
      magnitude += std::abs(term);
      squares += term * term;
    }
    *tolerance = 6 * x_rounding * std::sqrt(squares) + 2e-6 * magnitude + 1e-6;
    return sum;
  };
  for (int64_t i = 0; i < c.outputs; ++i) {
    double tolerance = 0;
    double expected = product(i, &tolerance);
    if (swiglu) {
      double up_tolerance = 0;
      const double up = product(c.outputs + i, &up_tolerance);
      const double silu = expected / (1 + std::exp(-expected));
      // The slope of SiLU is at most 1.1.
      tolerance = 1.1 * tolerance * (std::abs(up) + up_tolerance) + std::abs(silu) * up_tolerance;
      expected = silu * up;
    }
    expected += before[i];
    tolerance += 1.01 * RoundingOf(c.out_dtype) * std::abs(expected);
    ASSERT_NEAR(y.At(0, i), expected, tolerance) << "output " << i;
  }
}

// Widths of one chunk to the most, with and without a shorter last one; shares of one output to
// many groups.
constexpr struct {
  int64_t outputs, k;
} kShapes[] = {{1, 8},       {3, 64},      {131, 256},  {132, 264},  {133, 520},
               {700, 896},   {1000, 1024}, {9000, 136}, {576, 1536}, {300, 1800},
               {2000, 3584}, {1025, 4096}, {40, 5120},  {264, 8192}, {77, 9472},
               {400, 14336}, {135, 18944}, {50, 24576}, {33, 28672}};

TEST_F(GemvTest, StoresProducts) {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    for (const auto& [outputs, k] : kShapes) {
      for (const bool programmatic : {false, true}) {
        Check({outputs, k, dtype, dtype, GemvOutput::kStore, false, true, programmatic});
        if (HasFailure()) return;
      }
      Check({outputs, k, dtype, DType::kF32, GemvOutput::kStore, true, false, true});
      if (HasFailure()) return;
    }
  }
}

TEST_F(GemvTest, AddsToTheResidual) {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    for (const auto& [outputs, k] : kShapes) {
      Check({outputs, k, dtype, dtype, GemvOutput::kAdd, false, k % 512 == 0, true});
      if (HasFailure()) return;
    }
  }
}

TEST_F(GemvTest, NormsAndAppliesSwiGlu) {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    for (const auto& [outputs, k] : kShapes) {
      if (k > 24576) continue;  // pairs of such rows have no room
      Check({outputs, k, dtype, dtype, GemvOutput::kSwiGlu, true, k % 512 == 0, true});
      if (HasFailure()) return;
    }
  }
}

TEST_F(GemvTest, RefusesWhatItCannotDo) {
  const CudaMatrix x(1, 64, DType::kBF16), weight(8, 64, DType::kBF16), y(1, 8, DType::kBF16);
  const GemvOperands good{.x = x.view(), .weight = weight.view(), .y = y.view()};
  EXPECT_TRUE(Gemv::Supports(good));
  const auto refused = [&](auto change) {
    GemvOperands operands = good;
    change(operands);
    return !Gemv::Supports(operands);
  };
  EXPECT_TRUE(refused([](GemvOperands& o) { o.x.rows = 2; }));
  EXPECT_TRUE(refused([](GemvOperands& o) { o.x.cols = o.weight.cols = o.weight.stride = 60; }));
  EXPECT_TRUE(refused([](GemvOperands& o) { o.x.cols = o.weight.cols = o.weight.stride = 40000; }));
  EXPECT_TRUE(refused([](GemvOperands& o) { o.x.dtype = o.weight.dtype = DType::kF32; }));
  EXPECT_TRUE(refused([](GemvOperands& o) { o.weight.stride = 72; }));
  EXPECT_TRUE(refused([](GemvOperands& o) {
    o.output = GemvOutput::kAdd;
    o.y.dtype = DType::kF32;
  }));
}

// Reads of x wait for the kernel before, in a chain as a decode step has it, replayed as a graph.
TEST_F(GemvTest, ChainsInAGraph) {
  constexpr int64_t kWidth = 3584, kInner = 9472;
  CudaMatrix hidden(1, kWidth, DType::kBF16), inner(1, kInner, DType::kBF16);
  CudaMatrix up(2 * kInner, kWidth, DType::kBF16), down(kWidth, kInner, DType::kBF16);
  CudaMatrix norm(1, kWidth, DType::kF32);
  up.Fill(41, stream(), 0.02f);
  down.Fill(42, stream(), 0.02f);
  norm.Fill(43, stream(), 0.1f, 1);
  const auto run = [&](bool programmatic) -> absl::Status {
    for (int layer = 0; layer < 8; ++layer) {
      LOCKSTEP_RETURN_IF_ERROR(gemv_->Run({.x = hidden.view(),
                                           .norm_weight = norm.f32(),
                                           .norm_eps = 1e-6f,
                                           .weight = up.view(),
                                           .output = GemvOutput::kSwiGlu,
                                           .y = inner.view()},
                                          stream(), programmatic));
      LOCKSTEP_RETURN_IF_ERROR(gemv_->Run({.x = inner.view(),
                                           .weight = down.view(),
                                           .output = GemvOutput::kAdd,
                                           .y = hidden.view()},
                                          stream(), programmatic));
    }
    return absl::OkStatus();
  };
  hidden.Fill(44, stream());
  EXPECT_STATUS_OK(run(false));
  hidden.Download(stream());
  const std::string expected = hidden.Bits();

  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  const cudaStream_t raw = stream();
  ASSERT_EQ(cudaStreamBeginCapture(raw, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  EXPECT_STATUS_OK(run(true));
  ASSERT_EQ(cudaStreamEndCapture(raw, &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
  for (int repeat = 0; repeat < 50; ++repeat) {
    hidden.Fill(44, stream());
    inner.Poison(stream());
    ASSERT_EQ(cudaGraphLaunch(exec, raw), cudaSuccess);
    hidden.Download(stream());
    ASSERT_EQ(hidden.Bits(), expected) << "replay " << repeat;
  }
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
}

}  // namespace
}  // namespace lockstep
