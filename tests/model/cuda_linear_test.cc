// Products on the GPU against double precision: cuBLASLt's and whatever CudaLinear chooses, and
// what a step makes of them, captured in a graph.
#include "model/cuda_linear.h"

#include <cuda_runtime.h>

#include <tuple>

#include "tests/model/cuda_test_util.h"

namespace lockstep {
namespace {

struct Shape {
  int64_t rows, n, k;
  int64_t gap = 0;     // elements between rows of x, weight and y
  int64_t offset = 0;  // elements by which they are not aligned
  int spare_multiprocessors = 0;
};

class CudaLinearTest : public CudaTest {
 protected:
  void SetUp() override {
    CudaTest::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    auto cublas = CudaLinear::Create(CudaLinear::kDefaultWorkspaceBytes, false);
    ASSERT_TRUE(cublas.ok()) << cublas.status();
    cublas_ = *std::move(cublas);
  }

  // y of random operands, checked, with and without a bias.
  void Check(const Shape& shape, DType dtype, DType out_dtype);

  std::unique_ptr<CudaLinear> cublas_;  // for all products
};

void CudaLinearTest::Check(const Shape& shape, DType dtype, DType out_dtype) {
  SCOPED_TRACE(absl::StrFormat("[%d, %d] x [%d, %d]^T of %s to %s, gap %d, offset %d", shape.rows,
                               shape.k, shape.n, shape.k, Name(dtype), Name(out_dtype), shape.gap,
                               shape.offset));
  CudaMatrix x(shape.rows, shape.k, dtype, shape.gap, shape.offset);
  CudaMatrix weight(shape.n, shape.k, dtype, shape.gap, shape.offset);
  CudaMatrix bias(1, shape.n, out_dtype);
  CudaMatrix y(shape.rows, shape.n, out_dtype, shape.gap, shape.offset);
  x.Fill(21, stream());
  weight.Fill(22, stream(), 0.1f);
  bias.Fill(23, stream());
  std::vector<double> sums(shape.rows * shape.n), magnitudes(shape.rows * shape.n);
  std::vector<double> row(shape.k);
  for (int64_t c = 0; c < shape.n; ++c) {
    for (int64_t i = 0; i < shape.k; ++i) row[i] = weight.At(c, i);
    for (int64_t t = 0; t < shape.rows; ++t) {
      double sum = 0, magnitude = 0;
      for (int64_t i = 0; i < shape.k; ++i) {
        const double product = x.At(t, i) * row[i];
        sum += product;
        magnitude += std::abs(product);
      }
      sums[t * shape.n + c] = sum;
      magnitudes[t * shape.n + c] = magnitude;
    }
  }
  for (const auto& [linear, has_bias] : {std::pair(cublas_.get(), false),
                                         {cublas_.get(), true},
                                         {linear_.get(), false},
                                         {linear_.get(), true}}) {
    y.Poison(stream());
    EXPECT_STATUS_OK(linear->Run(x.view(), weight.view(), has_bias ? bias.view().data : nullptr,
                                 y.view(), stream(), shape.spare_multiprocessors));
    y.Download(stream());
    for (int64_t t = 0; t < shape.rows; ++t) {
      for (int64_t c = 0; c < shape.n; ++c) {
        const double expected = sums[t * shape.n + c] + (has_bias ? bias.At(0, c) : 0);
        // Products are exact (16 bits) or rounded once, added in float32. cuBLASLt may round the
        // sum before it adds the bias.
        const double roundings = has_bias ? 2.02 : 1.01;
        const double tolerance = roundings * RoundingOf(out_dtype) * std::abs(expected) +
                                 2e-6 * magnitudes[t * shape.n + c] + 1e-6;
        ASSERT_NEAR(y.At(t, c), expected, tolerance)
            << "row " << t << ", column " << c << (has_bias ? ", with a bias" : "");
      }
    }
  }
}

constexpr DType kTypes[] = {DType::kBF16, DType::kF16, DType::kF32};

TEST_F(CudaLinearTest, MatchesDoublePrecision) {
  for (const DType dtype : kTypes) {
    for (const Shape& shape : {Shape{1, 64, 64},
                               {1, 1000, 896},
                               {3, 130, 200, 8},
                               {16, 512, 512},
                               {33, 96, 1024},
                               {70, 256, 320},
                               {150, 264, 128},
                               {300, 64, 512, 8},
                               {5, 2, 4000}}) {
      Check(shape, dtype, dtype);
      if (dtype != DType::kF32) Check(shape, dtype, DType::kF32);
      if (HasFailure()) return;
    }
  }
}

TEST_F(CudaLinearTest, LeavesMultiprocessorsToOthers) {
  for (const DType dtype : kTypes) {
    for (const Shape& shape :
         {Shape{300, 520, 256, 0, 0, 24}, {70, 1000, 320, 0, 0, 100}, {1, 64, 64, 0, 0, 1000}}) {
      Check(shape, dtype, dtype);
      if (HasFailure()) return;
    }
  }
}

TEST_F(CudaLinearTest, TakesOddWidthsAndUnalignedRows) {
  for (const DType dtype : kTypes) {
    for (const Shape& shape :
         {Shape{3, 7, 33}, {1, 5, 31}, {20, 66, 50, 2}, {9, 64, 64, 0, 1}, {2, 31, 100, 1}}) {
      Check(shape, dtype, dtype);
      if (HasFailure()) return;
    }
  }
}

// A layer's worth of dependent operators: each reads what the one before wrote, and writes over
// what the one before that read.
class StepTest : public CudaLinearTest, public testing::WithParamInterface<int64_t> {
 protected:
  static constexpr int64_t kHidden = 512, kInner = 1536;

  void MakeOperands() {
    const int64_t rows = GetParam();
    const auto make = [](int64_t r, int64_t c) {
      return std::make_unique<CudaMatrix>(r, c, DType::kBF16);
    };
    residual_ = make(rows, kHidden);
    normed_ = make(rows, kHidden);
    gate_up_ = make(rows, 2 * kInner);
    activated_ = make(rows, kInner);
    up_weight_ = make(2 * kInner, kHidden);
    down_weight_ = make(kHidden, kInner);
    norm_weight_ = std::make_unique<CudaMatrix>(1, kHidden, DType::kF32);
    up_weight_->Fill(31, stream(), 0.05f);
    down_weight_->Fill(32, stream(), 0.05f);
    norm_weight_->Fill(33, stream(), 0.2f, 1);
  }

  // From residual_ and normed_, in place.
  absl::Status Step(const CudaContext& context) {
    for (int layer = 0; layer < 8; ++layer) {
      if (layer % 2 == 1 &&
          context.linear.TakesSwiGlu(normed_->view(), up_weight_->view(), activated_->view())) {
        LOCKSTEP_RETURN_IF_ERROR(LinearSwiGlu(normed_->view(), up_weight_->view(), nullptr,
                                              activated_->view(), context));
      } else {
        LOCKSTEP_RETURN_IF_ERROR(
            Linear(normed_->view(), up_weight_->view(), nullptr, gate_up_->view(), context));
        LOCKSTEP_RETURN_IF_ERROR(SiluMul(gate_up_->view(), activated_->view(), context));
      }
      LOCKSTEP_RETURN_IF_ERROR(
          Linear(activated_->view(), down_weight_->view(), nullptr, normed_->view(), context));
      LOCKSTEP_RETURN_IF_ERROR(AddRmsNorm(residual_->view(), normed_->view(), norm_weight_->f32(),
                                          1e-6f, normed_->view(), context));
    }
    return absl::OkStatus();
  }

  void FillInputs(uint32_t seed) {
    residual_->Fill(seed, stream());
    normed_->Fill(seed + 1, stream());
  }
  // Both, after the stream.
  std::string Outputs() {
    residual_->Download(stream());
    normed_->Download(stream());
    return residual_->Bits() + normed_->Bits();
  }

  std::unique_ptr<CudaMatrix> residual_, normed_, gate_up_, activated_, up_weight_, down_weight_,
      norm_weight_;
};

TEST_P(StepTest, ProgrammaticLaunchesAndGraphsGiveTheSameBits) {
  MakeOperands();
  const auto programmatic = [this] { return Context(true); };
  FillInputs(40);
  EXPECT_STATUS_OK(Step(programmatic()));  // before the capture: kernels are loaded, plans made
  Outputs();

  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  ASSERT_EQ(cudaStreamBeginCapture(stream(), cudaStreamCaptureModeThreadLocal), cudaSuccess);
  const absl::Status captured = Step(programmatic());
  ASSERT_EQ(cudaStreamEndCapture(stream(), &graph), cudaSuccess);
  ASSERT_TRUE(captured.ok()) << captured;
  ASSERT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);

  for (uint32_t seed = 50; seed < 60; ++seed) {
    FillInputs(seed);
    EXPECT_STATUS_OK(Step(Context(false)));
    const std::string plain = Outputs();
    FillInputs(seed);
    EXPECT_STATUS_OK(Step(programmatic()));
    EXPECT_TRUE(Outputs() == plain) << "programmatic launches, inputs " << seed;
    FillInputs(seed);
    EXPECT_EQ(cudaGraphLaunch(executable, stream()), cudaSuccess);
    EXPECT_TRUE(Outputs() == plain) << "a graph, inputs " << seed;
    EXPECT_FALSE(std::isnan(normed_->At(0, 0)));
  }
  EXPECT_EQ(cudaGraphExecDestroy(executable), cudaSuccess);
  EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
}

INSTANTIATE_TEST_SUITE_P(Rows, StepTest, testing::Values(1, 2, 8, 16, 17, 64));

}  // namespace
}  // namespace lockstep
