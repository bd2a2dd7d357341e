// Every operator on the GPU against a double-precision reference, on poisoned outputs, with and
// without programmatic launches, aligned and not.
#include "model/cuda_ops.h"

#include <algorithm>
#include <tuple>

#include "tests/model/cuda_test_util.h"

namespace lockstep {
namespace {

constexpr float kEps = 1e-5f;

// dtype, programmatic_launch.
class CudaOpsTest : public CudaTest, public testing::WithParamInterface<std::tuple<DType, bool>> {
 protected:
  DType dtype() const { return std::get<0>(GetParam()); }
  CudaContext Ctx() { return Context(std::get<1>(GetParam())); }
  // `value` was computed in float32 from terms of this magnitude, and rounded once.
  void ExpectNear(double value, double expected, double magnitude, const std::string& where) {
    const double tolerance =
        1.01 * RoundingOf(dtype()) * std::abs(expected) + 2e-6 * magnitude + 1e-7;
    EXPECT_NEAR(value, expected, tolerance) << where;
  }
};

std::string Where(int64_t row, int64_t col, int64_t cols) {
  return absl::StrFormat("row %d, column %d of %d", row, col, cols);
}

// Row r of x, as double.
std::vector<double> RowOf(const CudaMatrix& x, int64_t r) {
  std::vector<double> row(x.cols());
  for (int64_t c = 0; c < x.cols(); ++c) row[c] = x.At(r, c);
  return row;
}

double NormScale(const std::vector<double>& row) {
  double sum = 0;
  for (double v : row) sum += v * v;
  return 1 / std::sqrt(sum / static_cast<double>(row.size()) + double{kEps});
}

TEST_P(CudaOpsTest, GatherRowsFillsOtherRanksTokensWithZeros) {
  for (const auto& [cols, gap, offset] :
       {std::tuple{64, 8, 0}, {64, 0, 8}, {9, 2, 0}, {64, 0, 1}, {3584, 0, 0}, {4100, 8, 8}}) {
    const std::vector<int32_t> ids = {9, 10, 14, 15, -1, 12, 2147483647};
    const int64_t rows = static_cast<int64_t>(ids.size());
    CudaMatrix table(5, cols, dtype(), gap, offset), out(rows, cols, dtype(), gap, offset);
    table.Fill(1, stream());
    const CudaIndices device_ids(ids, stream());
    EXPECT_STATUS_OK(GatherRows(device_ids.get(), {10, 15}, table.view(), out.view(), Ctx()));
    out.Download(stream());
    for (int64_t t = 0; t < rows; ++t) {
      const bool known = ids[t] >= 10 && ids[t] < 15;
      for (int64_t c = 0; c < cols; ++c) {
        ASSERT_EQ(out.At(t, c), known ? table.At(ids[t] - 10, c) : 0) << Where(t, c, cols);
      }
    }
  }
}

// Widths: vectors, one to four of them a thread, more; odd ones, element by element.
constexpr int64_t kNormWidths[] = {1,    7,    64,    576,   1001,  3584,
                                   4096, 8192, 12288, 20000, 33000, 4099};

TEST_P(CudaOpsTest, RmsNormMatchesDoublePrecision) {
  for (const int64_t cols : kNormWidths) {
    for (const int64_t offset : {0, 1}) {
      CudaMatrix x(3, cols, dtype(), 8, offset), out(3, cols, dtype(), 16);
      CudaMatrix weight(1, cols, DType::kF32);
      x.Fill(3, stream(), 2);
      weight.Fill(4, stream(), 0.5f, 1);
      const CudaContext context = Ctx();
      EXPECT_STATUS_OK(RmsNorm(x.view(), weight.f32(), kEps, out.view(), context));
      out.Download(stream());
      for (int64_t t = 0; t < 3; ++t) {
        const std::vector<double> row = RowOf(x, t);
        const double scale = NormScale(row);
        for (int64_t c = 0; c < cols; ++c) {
          const double expected = row[c] * scale * weight.At(0, c);
          ExpectNear(out.At(t, c), expected, std::abs(expected), Where(t, c, cols));
        }
      }
      // In place: the same bits.
      const std::string apart = out.Bits();
      EXPECT_STATUS_OK(RmsNorm(x.view(), weight.f32(), kEps, x.view(), context));
      x.Download(stream());
      EXPECT_TRUE(x.Bits() == apart) << cols;
      if (HasFailure()) return;
    }
  }
}

TEST_P(CudaOpsTest, AddRmsNormRoundsTheSumOnceAndNormsWhatItRounded) {
  for (const int64_t cols : kNormWidths) {
    CudaMatrix residual(4, cols, dtype(), 8), delta(4, cols, dtype());
    CudaMatrix out(4, cols, dtype()), picked(3, cols, dtype(), 8), weight(1, cols, DType::kF32);
    residual.Fill(5, stream(), 3);
    delta.Fill(6, stream());
    weight.Fill(7, stream(), 0.5f, 1);
    CudaMatrix sum(4, cols, dtype());
    for (int64_t t = 0; t < 4; ++t) {
      for (int64_t c = 0; c < cols; ++c) {
        sum.Set(t, c, static_cast<float>(residual.At(t, c)) + static_cast<float>(delta.At(t, c)));
      }
    }
    const std::vector<int32_t> rows = {3, 0, 3};
    const CudaIndices device_rows(rows, stream());
    const CudaContext context = Ctx();
    EXPECT_STATUS_OK(AddRmsNormRows(residual.view(), delta.view(), device_rows.get(), weight.f32(),
                                    kEps, picked.view(), context));
    EXPECT_STATUS_OK(
        AddRmsNorm(residual.view(), delta.view(), weight.f32(), kEps, out.view(), context));
    const std::string before = delta.Bits();
    for (CudaMatrix* m : {&residual, &delta, &out, &picked}) m->Download(stream());
    EXPECT_TRUE(delta.Bits() == before);
    EXPECT_TRUE(residual.Bits() == sum.Bits()) << cols;
    for (int64_t t = 0; t < 4; ++t) {
      const std::vector<double> row = RowOf(sum, t);
      const double scale = NormScale(row);
      for (int64_t c = 0; c < cols; ++c) {
        const double expected = row[c] * scale * weight.At(0, c);
        ExpectNear(out.At(t, c), expected, std::abs(expected), Where(t, c, cols));
      }
    }
    for (int64_t r = 0; r < 3; ++r) EXPECT_TRUE(picked.RowBits(r) == out.RowBits(rows[r]));
    if (HasFailure()) return;
  }
}

TEST_P(CudaOpsTest, AddRmsNormOverDelta) {
  for (const int64_t cols : {3584, 40000}) {
    CudaMatrix residual(2, cols, dtype()), again(2, cols, dtype()), weight(1, cols, DType::kF32);
    CudaMatrix delta(2, cols, dtype()), out(2, cols, dtype());
    residual.Fill(8, stream());
    again.Fill(8, stream());
    delta.Fill(9, stream());
    weight.Fill(10, stream());
    const CudaContext context = Ctx();
    EXPECT_STATUS_OK(
        AddRmsNorm(residual.view(), delta.view(), weight.f32(), kEps, out.view(), context));
    EXPECT_STATUS_OK(
        AddRmsNorm(again.view(), delta.view(), weight.f32(), kEps, delta.view(), context));
    out.Download(stream());
    delta.Download(stream());
    EXPECT_TRUE(out.Bits() == delta.Bits());
  }
}

TEST_P(CudaOpsTest, SiluMulMatchesDoublePrecision) {
  for (const auto& [cols, gap, offset] : {std::tuple{1, 0, 0},
                                          {7, 1, 0},
                                          {64, 0, 0},
                                          {1536, 8, 0},
                                          {1536, 0, 1},
                                          {18944, 0, 0},
                                          {9476, 0, 0}}) {
    CudaMatrix gate_up(3, 2 * cols, dtype(), gap, offset), out(3, cols, dtype(), gap);
    gate_up.Fill(16, stream(), 4);
    for (const auto& [t, gate] : {std::pair{0, -60000.0}, {1, 60000.0}, {2, -0.0}}) {
      gate_up.Set(t, 0, gate);
      gate_up.Set(t, cols, 0.5);
    }
    gate_up.Upload(stream());
    EXPECT_STATUS_OK(SiluMul(gate_up.view(), out.view(), Ctx()));
    out.Download(stream());
    for (int64_t t = 0; t < 3; ++t) {
      for (int64_t c = 0; c < cols; ++c) {
        const double gate = gate_up.At(t, c), up = gate_up.At(t, cols + c);
        const double expected = gate / (1 + std::exp(-gate)) * up;
        ExpectNear(out.At(t, c), expected, std::abs(expected), Where(t, c, cols));
      }
    }
    if (HasFailure()) return;
  }
}

TEST_P(CudaOpsTest, NoRows) {
  CudaMatrix weight(1, 64, DType::kF32);
  const MatrixView none = {nullptr, dtype(), 0, 64, 64};
  const MatrixView wide = {nullptr, dtype(), 0, 128, 128};
  const MatrixView table = {nullptr, dtype(), 5, 64, 64};
  const CudaContext context = Ctx();
  EXPECT_STATUS_OK(GatherRows(nullptr, {0, 5}, table, none, context));
  EXPECT_STATUS_OK(RmsNorm(none, weight.f32(), kEps, none, context));
  EXPECT_STATUS_OK(AddRmsNorm(none, none, weight.f32(), kEps, none, context));
  EXPECT_STATUS_OK(AddRmsNormRows(none, none, nullptr, weight.f32(), kEps, none, context));
  EXPECT_STATUS_OK(SiluMul(wide, none, context));
  EXPECT_STATUS_OK(Linear(none, {nullptr, dtype(), 64, 64, 64}, nullptr, none, context));
}

TEST_P(CudaOpsTest, ManyRows) {
  const int64_t tokens = 70000, cols = 8;  // more than a grid's second and third dimension
  CudaMatrix gate_up(tokens, 2 * cols, dtype()), out(tokens, cols, dtype());
  CudaMatrix weight(1, cols, DType::kF32);
  gate_up.Fill(18, stream());
  weight.Fill(19, stream());
  EXPECT_STATUS_OK(SiluMul(gate_up.view(), out.view(), Ctx()));
  EXPECT_STATUS_OK(RmsNorm(out.view(), weight.f32(), kEps, out.view(), Ctx()));
  out.Download(stream());
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t c = 0; c < cols; ++c) ASSERT_FALSE(std::isnan(out.At(t, c))) << t;
  }
}

INSTANTIATE_TEST_SUITE_P(DTypes, CudaOpsTest,
                         testing::Combine(testing::Values(DType::kF32, DType::kBF16, DType::kF16),
                                          testing::Bool()),
                         [](const auto& info) {
                           return std::string(Name(std::get<0>(info.param))) +
                                  (std::get<1>(info.param) ? "_programmatic" : "");
                         });

}  // namespace
}  // namespace lockstep
