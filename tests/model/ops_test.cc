// Every operator against a double-precision reference, on outputs poisoned with NaN; and the rule
// of ops.h that a row's bits depend on nothing but the row.
#include "model/ops.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

namespace lockstep {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// A matrix with room to the right of its columns, which no operator may touch.
struct Matrix {
  Matrix(int64_t rows, int64_t cols, int64_t stride, DType dtype = DType::kF32)
      : bytes(rows * stride * SizeOf(dtype)), view{bytes.data(), dtype, rows, cols, stride} {}
  Matrix(const Matrix&) = delete;

  double At(int64_t r, int64_t c) const {
    if (view.dtype == DType::kF32) return view.row<float>(r)[c];
    return ToFloat(view.row<BF16>(r)[c]);
  }
  std::vector<char> bytes;
  MatrixView view;
};

void Fill(Matrix& m, uint32_t seed, float scale = 1) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, scale);
  for (int64_t r = 0; r < m.view.rows; ++r) {
    for (int64_t c = 0; c < m.view.stride; ++c) {
      const float value = c < m.view.cols ? normal(random) : kNaN;
      if (m.view.dtype == DType::kF32) {
        m.view.row<float>(r)[c] = value;
      } else {
        m.view.row<BF16>(r)[c] = ToBF16(value);
      }
    }
  }
}

// The matrix in the layout that products read.
class Packed {
 public:
  explicit Packed(const Matrix& m) {
    const int64_t bytes = PackedBytes(m.view.rows, m.view.cols, m.view.dtype);
    storage_ = Buffer::Create(bytes, "packed").value();
    std::memset(storage_.data(), 0xff, bytes);  // NaN where packing forgets something
    const int64_t row_bytes = m.view.cols * SizeOf(m.view.dtype);
    for (int64_t r = 0; r < m.view.rows; ++r) {
      std::memcpy(storage_.as<char>() + r * row_bytes,
                  m.bytes.data() + r * m.view.stride * SizeOf(m.view.dtype), row_bytes);
    }
    view_ = PackInPlace(storage_, m.view.dtype, m.view.rows, m.view.cols);
  }
  const PackedMatrix& view() const { return view_; }

 private:
  Buffer storage_;
  PackedMatrix view_;
};

void Poison(Matrix& m) {
  for (int64_t i = 0; i < m.view.rows * m.view.stride; ++i) m.view.row<float>(0)[i] = kNaN;
}

void ExpectGapsUntouched(const Matrix& m) {
  for (int64_t r = 0; r < m.view.rows; ++r) {
    for (int64_t c = m.view.cols; c < m.view.stride; ++c) EXPECT_TRUE(std::isnan(m.At(r, c)));
  }
}

class OpsTest : public testing::Test {
 protected:
  OpsTest() : workspace_(Buffer::Create(8 << 20, "workspace").value()) {}
  OpContext Context(CpuIsa isa = BestCpuIsa()) { return {threads_, workspace_, isa}; }

  ThreadPool threads_{2};
  Buffer workspace_;
};

class LinearTest : public OpsTest, public testing::WithParamInterface<std::tuple<CpuIsa, DType>> {
 protected:
  void SetUp() override {
    const std::vector<CpuIsa> isas = SupportedCpuIsas();
    if (std::find(isas.begin(), isas.end(), Isa()) == isas.end()) {
      GTEST_SKIP() << "this CPU has no " << Name(Isa());
    }
  }
  CpuIsa Isa() const { return std::get<0>(GetParam()); }
  DType WeightDType() const { return std::get<1>(GetParam()); }
};

TEST_P(LinearTest, MatchesDoublePrecision) {
  for (const auto& [rows, n, k] : {std::tuple{1, 1, 1},
                                   {1, 7, 33},
                                   {2, 5, 16},
                                   {3, 17, 31},
                                   {4, 64, 64},
                                   {5, 13, 100},
                                   {9, 24, 257},
                                   {7, 33, 2048},
                                   {3, 9, 2049},
                                   {6, 65, 40},
                                   {7, 49, 64},
                                   {8, 95, 130},
                                   {11, 130, 77},
                                   {97, 50, 19},
                                   {70, 10, 4101},
                                   {1, 40, 5000}}) {
    Matrix x(rows, k, k + 3), w(n, k, k + 5, WeightDType()), y(rows, n, n + 2), bias(1, n, n);
    Fill(x, 1);
    Fill(w, 2, 0.1f);
    Fill(bias, 3);
    const Packed packed(w);
    for (const float* b : {static_cast<const float*>(nullptr), bias.view.row<const float>(0)}) {
      Poison(y);
      Linear(x.view, packed.view(), b, y.view, Context(Isa()));
      for (int64_t t = 0; t < rows; ++t) {
        for (int64_t c = 0; c < n; ++c) {
          double sum = 0;
          double magnitude = 0;
          for (int64_t i = 0; i < k; ++i) {
            double xi = x.At(t, i);
            if (WeightDType() == DType::kBF16) xi = ToFloat(ToBF16(static_cast<float>(xi)));
            sum += xi * w.At(c, i);
            magnitude += std::abs(xi * w.At(c, i));
          }
          if (b != nullptr) sum += b[c];
          // Products are exact or rounded once, then summed in float32 over lanes and blocks.
          ASSERT_NEAR(y.At(t, c), sum, 1e-6 * (magnitude + 1))
              << rows << " x " << n << " x " << k << " at " << t << ", " << c;
        }
      }
      ExpectGapsUntouched(y);
    }
  }
}

TEST_P(LinearTest, ARowsBitsDependOnTheRowAlone) {
  const int64_t k = 2100;
  const int64_t n = 101;
  const int64_t rows = 131;
  Matrix x(rows, k, k), w(n, k, k, WeightDType()), whole(rows, n, n), one(1, n, n);
  Fill(x, 4);
  Fill(w, 5);
  const Packed packed(w);
  Linear(x.view, packed.view(), nullptr, whole.view, Context(Isa()));
  const auto expect_rows_equal = [&](const MatrixView& y, int64_t first) {
    for (int64_t t = 0; t < y.rows; ++t) {
      ASSERT_EQ(std::memcmp(y.row<float>(t), whole.view.row<float>(first + t), n * 4), 0)
          << y.rows << " rows from " << first << ", row " << t;
    }
  };
  for (int64_t t = 0; t < rows; ++t) {  // alone
    Linear({x.view.row<float>(t), DType::kF32, 1, k, k}, packed.view(), nullptr, one.view,
           Context(Isa()));
    expect_rows_equal(one.view, t);
  }
  for (int64_t count = 2; count <= 17; ++count) {  // in batches of every height, elsewhere in them
    Matrix part(count, n, n);
    Linear({x.view.row<float>(11), DType::kF32, count, k, k}, packed.view(), nullptr, part.view,
           Context(Isa()));
    expect_rows_equal(part.view, 11);
  }
  for (int num_threads : {1, 3, 5}) {
    ThreadPool threads(num_threads);
    Matrix again(rows, n, n);
    Linear(x.view, packed.view(), nullptr, again.view, {threads, workspace_, Isa()});
    expect_rows_equal(again.view, 0);
  }
}

TEST_P(LinearTest, KeepsInfinitiesAndNaN) {
  Matrix x(1, 40, 40), w(1, 40, 40, WeightDType()), y(1, 1, 1);
  Fill(x, 6);
  Fill(w, 7);
  const Packed packed(w);
  x.view.row<float>(0)[33] = kNaN;
  Linear(x.view, packed.view(), nullptr, y.view, Context(Isa()));
  EXPECT_TRUE(std::isnan(y.At(0, 0)));
  x.view.row<float>(0)[33] = std::numeric_limits<float>::infinity();
  Linear(x.view, packed.view(), nullptr, y.view, Context(Isa()));
  EXPECT_TRUE(std::isinf(y.At(0, 0)));
}

INSTANTIATE_TEST_SUITE_P(AllKernels, LinearTest,
                         testing::Combine(testing::Values(CpuIsa::kPortable, CpuIsa::kAvx2,
                                                          CpuIsa::kAvx512, CpuIsa::kAvx512Bf16),
                                          testing::Values(DType::kF32, DType::kBF16)),
                         [](const auto& info) {
                           return std::string(Name(std::get<0>(info.param))) + "_" +
                                  std::string(Name(std::get<1>(info.param)));
                         });

TEST_F(OpsTest, GatherRowsFillsOtherRanksTokensWithZeros) {
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    Matrix table(5, 9, 11, dtype), out(4, 9, 9);
    Fill(table, 8);
    Poison(out);
    const std::vector<int32_t> ids = {9, 10, 14, 15};
    GatherRows(ids, {10, 15}, Packed(table).view(), out.view, Context());
    for (int64_t c = 0; c < 9; ++c) {
      EXPECT_EQ(out.At(0, c), 0);
      EXPECT_EQ(out.At(1, c), table.At(0, c));
      EXPECT_EQ(out.At(2, c), table.At(4, c));
      EXPECT_EQ(out.At(3, c), 0);
    }
  }
}

double NormReference(const std::vector<double>& row, double weight, double eps, int64_t c) {
  double sum = 0;
  for (double v : row) sum += v * v;
  return row[c] / std::sqrt(sum / static_cast<double>(row.size()) + eps) * weight;
}

TEST_F(OpsTest, RmsNormMatchesDoublePrecision) {
  for (int64_t cols : {1, 7, 64, 1001}) {
    Matrix x(3, cols, cols + 1), delta(3, cols, cols), weight(1, cols, cols);
    Matrix plain(3, cols, cols + 2), added(3, cols, cols), picked(2, cols, cols);
    Fill(x, 9);
    Fill(delta, 10);
    Fill(weight, 11);
    Poison(plain);
    Poison(added);
    Poison(picked);
    const float* w = weight.view.row<float>(0);
    std::vector<std::vector<double>> rows(3), sums(3);
    for (int64_t t = 0; t < 3; ++t) {
      for (int64_t c = 0; c < cols; ++c) {
        rows[t].push_back(x.At(t, c));
        sums[t].push_back(static_cast<float>(x.At(t, c) + delta.At(t, c)));
      }
    }
    RmsNorm(x.view, w, 1e-5f, plain.view, Context());
    const std::vector<int32_t> picks = {2, 0};
    AddRmsNormRows(x.view, delta.view, picks, w, 1e-5f, picked.view, Context());
    AddRmsNorm(x.view, delta.view, w, 1e-5f, added.view, Context());
    for (int64_t c = 0; c < cols; ++c) {
      for (int64_t t = 0; t < 3; ++t) {
        EXPECT_NEAR(plain.At(t, c), NormReference(rows[t], w[c], 1e-5f, c), 1e-5);
        EXPECT_NEAR(added.At(t, c), NormReference(sums[t], w[c], 1e-5f, c), 1e-5);
        EXPECT_EQ(x.At(t, c), sums[t][c]);
      }
      EXPECT_EQ(picked.At(0, c), added.At(2, c));
      EXPECT_EQ(picked.At(1, c), added.At(0, c));
    }
    ExpectGapsUntouched(plain);
  }
}

TEST_F(OpsTest, RmsNormHeadsNormsEachHeadByItself) {
  const int64_t head_dim = 6;
  Matrix x(3, 4 * head_dim, 4 * head_dim + 5), before(3, 4 * head_dim, 4 * head_dim + 5);
  Matrix weight(1, head_dim, head_dim);
  Fill(x, 12);
  Fill(before, 12);
  Fill(weight, 13);
  RmsNormHeads(x.view, head_dim, weight.view.row<float>(0), 1e-6f, Context());
  for (int64_t t = 0; t < 3; ++t) {
    for (int64_t h = 0; h < 4; ++h) {
      std::vector<double> head;
      for (int64_t c = 0; c < head_dim; ++c) head.push_back(before.At(t, h * head_dim + c));
      for (int64_t c = 0; c < head_dim; ++c) {
        EXPECT_NEAR(x.At(t, h * head_dim + c), NormReference(head, weight.At(0, c), 1e-6f, c),
                    1e-5);
      }
    }
  }
  ExpectGapsUntouched(x);
}

TEST_F(OpsTest, ApplyRopeTurnsTheFirstDimsAndNoOthers) {
  const int64_t head_dim = 128;
  const int64_t rotary_dim = 64;
  Matrix x(3, 2 * head_dim, 3 * head_dim), before(3, 2 * head_dim, 3 * head_dim);
  Matrix cos(3, rotary_dim / 2, rotary_dim / 2), sin(3, rotary_dim / 2, rotary_dim / 2);
  Fill(x, 14);
  Fill(before, 14);
  Fill(cos, 15);
  Fill(sin, 16);
  ApplyRope(x.view, head_dim, rotary_dim, cos.view.row<float>(0), sin.view.row<float>(0),
            Context());
  for (int64_t t = 0; t < 3; ++t) {
    for (int64_t h = 0; h < 2; ++h) {
      for (int64_t d = 0; d < head_dim; ++d) {
        const auto at = [&](int64_t dim) { return before.At(t, h * head_dim + dim); };
        double expected = at(d);
        const int64_t pair = d % (rotary_dim / 2);
        if (d < rotary_dim / 2) {
          expected = at(d) * cos.At(t, pair) - at(d + rotary_dim / 2) * sin.At(t, pair);
        } else if (d < rotary_dim) {
          expected = at(d) * cos.At(t, pair) + at(d - rotary_dim / 2) * sin.At(t, pair);
        } else {
          EXPECT_EQ(x.At(t, h * head_dim + d), expected);
        }
        EXPECT_NEAR(x.At(t, h * head_dim + d), expected, 1e-5);
      }
    }
  }
  ExpectGapsUntouched(x);
}

TEST_F(OpsTest, SiluMulMatchesDoublePrecisionAndSurvivesLargeValues) {
  for (const CpuIsa isa : SupportedCpuIsas()) {
    for (int64_t cols : {1, 300, 2000}) {
      Matrix gate_up(3, 2 * cols, 2 * cols + 1), out(3, cols, cols + 4);
      Fill(gate_up, 17, 3);
      gate_up.view.row<float>(0)[0] = -200;
      gate_up.view.row<float>(1)[0] = 200;
      Poison(out);
      SiluMul(gate_up.view, out.view, Context(isa));
      for (int64_t t = 0; t < 3; ++t) {
        for (int64_t c = 0; c < cols; ++c) {
          const double gate = gate_up.At(t, c);
          const double expected = gate / (1 + std::exp(-gate)) * gate_up.At(t, cols + c);
          EXPECT_NEAR(out.At(t, c), expected, 1e-6 * std::abs(expected) + 1e-30) << Name(isa);
        }
      }
      ExpectGapsUntouched(out);
    }
  }
}

TEST_F(OpsTest, SiluMulsBitsDoNotDependOnThePlaceAndNaNStays) {
  for (const CpuIsa isa : SupportedCpuIsas()) {
    Matrix gate_up(1, 2 * 67, 2 * 67), whole(1, 67, 67), one(1, 1, 1), pair(1, 2, 2);
    Fill(gate_up, 20, 4);
    gate_up.view.row<float>(0)[3] = kNaN;
    SiluMul(gate_up.view, whole.view, Context(isa));
    for (int64_t c = 0; c < 67; ++c) {
      pair.view.row<float>(0)[0] = gate_up.view.row<float>(0)[c];
      pair.view.row<float>(0)[1] = gate_up.view.row<float>(0)[67 + c];
      SiluMul(pair.view, one.view, Context(isa));
      if (c == 3) {
        EXPECT_TRUE(std::isnan(one.At(0, 0)) && std::isnan(whole.At(0, c)));
      } else {
        EXPECT_EQ(one.At(0, 0), whole.At(0, c)) << Name(isa) << ", " << c;
      }
    }
  }
}

TEST_F(OpsTest, NoRowsIsNoWork) {
  Matrix x(0, 8, 8), w(4, 8, 8), y(0, 4, 4), weight(1, 8, 8);
  Fill(w, 18);
  Fill(weight, 19);
  const Packed packed(w);
  Linear(x.view, packed.view(), nullptr, y.view, Context());
  RmsNorm(x.view, weight.view.row<float>(0), 1e-6f, x.view, Context());
  GatherRows({}, {0, 4}, packed.view(), x.view, Context());
}

}  // namespace
}  // namespace lockstep
