// Products on the GPU against double precision: cuBLASLt's and ours, and what a step makes of them,
// captured in a graph.
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
};

class CudaLinearTest : public CudaTest {
 protected:
  // y of random operands, checked, by `path`, with and without a bias.
  void Check(const Shape& shape, DType dtype, DType out_dtype, LinearPath path,
             bool programmatic = false);
};

void CudaLinearTest::Check(const Shape& shape, DType dtype, DType out_dtype, LinearPath path,
                           bool programmatic) {
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
  for (const bool has_bias : {false, true}) {
    y.Poison(stream());
    EXPECT_STATUS_OK(linear().Run(x.view(), weight.view(), has_bias ? bias.view().data : nullptr,
                                  y.view(), stream(), programmatic, path));
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

TEST_F(CudaLinearTest, CublasLtMatchesDoublePrecision) {
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
      Check(shape, dtype, dtype, LinearPath::kCublasLt);
      if (dtype != DType::kF32) Check(shape, dtype, DType::kF32, LinearPath::kCublasLt);
      if (HasFailure()) return;
    }
  }
}

TEST_F(CudaLinearTest, CublasLtTakesOddWidthsAndUnalignedRows) {
  for (const DType dtype : kTypes) {
    for (const Shape& shape :
         {Shape{3, 7, 33}, {1, 5, 31}, {20, 66, 50, 2}, {9, 64, 64, 0, 1}, {2, 31, 100, 1}}) {
      Check(shape, dtype, dtype, LinearPath::kCublasLt);
      if (HasFailure()) return;
    }
  }
}

// Of the kernel for few rows: every number of rows, shares of one row to several tiles, one stage
// and many, with a shorter last one.
TEST_F(CudaLinearTest, SkinnyMatchesDoublePrecision) {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    for (const bool programmatic : {false, true}) {
      for (int64_t rows = 1; rows <= 16; ++rows) {
        Check({rows, 133, 160}, dtype, dtype, LinearPath::kSkinny, programmatic);
      }
      for (const Shape& shape : {Shape{1, 1, 32},
                                 {1, 5, 4128},
                                 {16, 3, 2048},
                                 {2, 131, 64, 8},
                                 {4, 132, 96},
                                 {8, 264, 992, 16},
                                 {9, 700, 512},
                                 {1, 3584, 1792},
                                 {3, 4300, 544},
                                 {16, 4608, 288},
                                 {7, 9240, 128},
                                 {16, 9471, 160, 8, 8},
                                 {1, 2304, 3584},
                                 {13, 700, 4864},
                                 {1, 37888, 96},
                                 {3, 50, 8},
                                 {6, 2300, 1000},
                                 {12, 140, 2312},
                                 {5, 1025, 1024}}) {
        Check(shape, dtype, dtype, LinearPath::kSkinny, programmatic);
        Check(shape, dtype, DType::kF32, LinearPath::kSkinny, programmatic);
        if (HasFailure()) return;
      }
    }
  }
}

TEST_F(CudaLinearTest, SkinnyRowsBitsDependOnTheRowAlone) {
  const int64_t n = 4700, k = 1056;
  CudaMatrix x(16, k, DType::kBF16), weight(n, k, DType::kBF16);
  CudaMatrix y(16, n, DType::kBF16), one(1, n, DType::kBF16);
  x.Fill(24, stream());
  weight.Fill(25, stream(), 0.1f);
  std::vector<std::string> rows;
  for (int64_t t = 0; t < 16; ++t) {
    MatrixView row = x.view();
    row.data = row.row<BF16>(t);
    row.rows = 1;
    EXPECT_STATUS_OK(linear().Run(row, weight.view(), nullptr, one.view(), stream(), false,
                                  LinearPath::kSkinny));
    one.Download(stream());
    rows.push_back(one.RowBits(0));
  }
  for (int64_t count = 2; count <= 16; ++count) {
    MatrixView some = x.view(), some_y = y.view();
    some.rows = some_y.rows = count;
    EXPECT_STATUS_OK(
        linear().Run(some, weight.view(), nullptr, some_y, stream(), false, LinearPath::kSkinny));
    y.Download(stream());
    for (int64_t t = 0; t < count; ++t) {
      ASSERT_TRUE(y.RowBits(t) == rows[t]) << "row " << t << " of " << count;
    }
  }
}

TEST_F(CudaLinearTest, SkinnyKeepsNaNToItsRowAndColumn) {
  const int64_t n = 300, k = 256;
  CudaMatrix x(3, k, DType::kBF16), weight(n, k, DType::kBF16), y(3, n, DType::kF32);
  x.Fill(26, stream());
  weight.Fill(27, stream());
  x.Set(1, 200, NAN);
  weight.Set(7, 3, INFINITY);
  x.Upload(stream());
  weight.Upload(stream());
  EXPECT_STATUS_OK(linear().Run(x.view(), weight.view(), nullptr, y.view(), stream(), false,
                                LinearPath::kSkinny));
  y.Download(stream());
  for (int64_t t = 0; t < 3; ++t) {
    for (int64_t c = 0; c < n; ++c) {
      ASSERT_EQ(std::isfinite(y.At(t, c)), t != 1 && c != 7) << t << ", " << c;
    }
  }
}

TEST_F(CudaLinearTest, RefusesWhatTheKernelForFewRowsDoesNotTake) {
  CudaMatrix x(17, 64, DType::kBF16), weight(8, 64, DType::kBF16), y(17, 8, DType::kBF16);
  const auto run = [&](MatrixView a, MatrixView b, MatrixView c) {
    return linear().Run(a, b, nullptr, c, stream(), false, LinearPath::kSkinny).code();
  };
  EXPECT_EQ(run(x.view(), weight.view(), y.view()), absl::StatusCode::kInvalidArgument);
  CudaMatrix odd(4, 33, DType::kBF16), odd_weight(8, 33, DType::kBF16), few(4, 8, DType::kBF16);
  EXPECT_EQ(run(odd.view(), odd_weight.view(), few.view()), absl::StatusCode::kInvalidArgument);
  CudaMatrix shifted(4, 64, DType::kBF16, 0, 1);
  EXPECT_EQ(run(shifted.view(), weight.view(), few.view()), absl::StatusCode::kInvalidArgument);
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
      LOCKSTEP_RETURN_IF_ERROR(
          Linear(normed_->view(), up_weight_->view(), nullptr, gate_up_->view(), context));
      LOCKSTEP_RETURN_IF_ERROR(SiluMul(gate_up_->view(), activated_->view(), context));
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

TEST_F(CudaLinearTest, PrepareTakesEveryKindOfProduct) {
  for (const DType dtype : kTypes) {
    for (const DType out_dtype : {dtype, DType::kF32}) {
      for (const bool has_bias : {false, true}) {
        for (const int64_t rows : {0, 1, 16, 32, 300}) {
          EXPECT_STATUS_OK(
              linear().Prepare({rows, 512, 256, dtype, out_dtype, has_bias}, stream()));
        }
      }
    }
  }
}

}  // namespace
}  // namespace lockstep
