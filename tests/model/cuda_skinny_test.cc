// Products of few rows against double precision, on poisoned outputs; and that the same shapes give
// the same bits, whichever block comes last.
#include "model/cuda_skinny.h"

#include <vector>

#include "tests/model/cuda_test_util.h"

namespace lockstep {
namespace {

struct Shape {
  int64_t rows, n, k;
  int64_t gap = 0;  // elements between rows of x, weight and y
};

class CudaSkinnyTest : public CudaTest {
 protected:
  void SetUp() override {
    CudaTest::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    auto skinny = CudaSkinny::Create(num_multiprocessors_);
    ASSERT_TRUE(skinny.ok()) << skinny.status();
    skinny_ = *std::move(skinny);
    if (skinny_ == nullptr) GTEST_SKIP() << "no Hopper GPU";
  }

  absl::Status Run(const SkinnyProduct& product, bool programmatic, int spare_multiprocessors) {
    return skinny_->Run(product, {stream(), programmatic, spare_multiprocessors});
  }

  // y of random operands, with and without a bias.
  void Check(const Shape& shape, DType dtype, DType out_dtype, bool gated,
             int spare_multiprocessors = 0);

  std::unique_ptr<CudaSkinny> skinny_;
};

// Sums and the sums of magnitudes of x * weight^T, [T, N].
struct Sums {
  Sums(const CudaMatrix& x, const CudaMatrix& weight)
      : n(weight.rows()), sums(x.rows() * n), magnitudes(x.rows() * n) {
    std::vector<double> row(x.cols()), xs;
    for (int64_t t = 0; t < x.rows(); ++t) {
      for (int64_t i = 0; i < x.cols(); ++i) xs.push_back(x.At(t, i));
    }
    for (int64_t c = 0; c < n; ++c) {
      for (int64_t i = 0; i < x.cols(); ++i) row[i] = weight.At(c, i);
      for (int64_t t = 0; t < x.rows(); ++t) {
        double sum = 0, magnitude = 0;
        for (int64_t i = 0; i < x.cols(); ++i) {
          const double product = xs[t * x.cols() + i] * row[i];
          sum += product;
          magnitude += std::abs(product);
        }
        sums[t * n + c] = sum;
        magnitudes[t * n + c] = magnitude;
      }
    }
  }
  int64_t n;
  std::vector<double> sums, magnitudes;
};

void CudaSkinnyTest::Check(const Shape& shape, DType dtype, DType out_dtype, bool gated,
                           int spare_multiprocessors) {
  SCOPED_TRACE(absl::StrFormat("[%d, %d] x [%d, %d]^T of %s to %s, gap %d%s", shape.rows, shape.k,
                               shape.n, shape.k, Name(dtype), Name(out_dtype), shape.gap,
                               gated ? ", gated" : ""));
  const int64_t weight_rows = gated ? 2 * shape.n : shape.n;
  CudaMatrix x(shape.rows, shape.k, dtype, shape.gap);
  CudaMatrix weight(weight_rows, shape.k, dtype, shape.gap);
  CudaMatrix bias(1, weight_rows, out_dtype);
  CudaMatrix y(shape.rows, shape.n, out_dtype, shape.gap);
  x.Fill(21, stream());
  weight.Fill(22, stream(), 0.1f);
  bias.Fill(23, stream());
  const Sums sums(x, weight);
  // float32 sums of exact products, then one rounding.
  const auto near = [&](double value, int64_t t, int64_t c, bool has_bias) {
    const int64_t i = t * weight_rows + c;
    double expected = sums.sums[i] + (has_bias ? bias.At(0, c) : 0);
    double error = 2e-6 * sums.magnitudes[i] + 1e-6;
    if (gated) {
      const int64_t j = i + shape.n;
      const double up = sums.sums[j] + (has_bias ? bias.At(0, shape.n + c) : 0);
      const double gate = expected / (1 + std::exp(-expected));
      error = 1.2 * error * std::abs(up) + (2e-6 * sums.magnitudes[j] + 1e-6) * std::abs(gate) +
              1e-6 * std::abs(gate * up);
      expected = gate * up;
    }
    return std::abs(value - expected) <= 1.01 * RoundingOf(out_dtype) * std::abs(expected) + error;
  };
  for (const bool has_bias : {false, true}) {
    const SkinnyProduct product = {x.view(), weight.view(), has_bias ? bias.view().data : nullptr,
                                   y.view(), gated};
    ASSERT_TRUE(CudaSkinny::Takes(product));
    y.Poison(stream());
    EXPECT_STATUS_OK(Run(product, false, spare_multiprocessors));
    y.Download(stream());
    for (int64_t t = 0; t < shape.rows; ++t) {
      for (int64_t c = 0; c < shape.n; ++c) {
        ASSERT_TRUE(near(y.At(t, c), t, c, has_bias))
            << "row " << t << ", column " << c << (has_bias ? ", with a bias" : "") << ": "
            << y.At(t, c) << ", expected without it " << sums.sums[t * weight_rows + c];
      }
    }
    // The same again, in a row of programmatic launches: the same bits.
    const std::string bits = y.Bits();
    y.Poison(stream());
    for (int i = 0; i < 8; ++i) EXPECT_STATUS_OK(Run(product, true, spare_multiprocessors));
    y.Download(stream());
    ASSERT_TRUE(y.Bits() == bits) << "other bits the second time";
  }
}

constexpr DType kTypes[] = {DType::kBF16, DType::kF16};

TEST_F(CudaSkinnyTest, AnyNumberOfRowsMatchesDoublePrecision) {
  for (const DType dtype : kTypes) {
    for (const int64_t rows : {1, 2, 7, 8, 9, 16, 17, 23, 24, 25, 31, 32}) {
      Check({rows, 200, 1024}, dtype, dtype, false);
      if (HasFailure()) return;
    }
  }
}

TEST_F(CudaSkinnyTest, AnyShapeMatchesDoublePrecision) {
  for (const DType dtype : kTypes) {
    for (const Shape& shape : {Shape{8, 64, 64},
                               {3, 1, 8},
                               {5, 2, 4000},
                               {16, 1000, 896},
                               {8, 130, 200, 8},
                               {12, 333, 72, 16},
                               {32, 512, 512},
                               {27, 96, 1024, 24},
                               {4, 31, 104},
                               {6, 7, 33, 7},
                               {30, 257, 1096}}) {
      Check(shape, dtype, dtype, false);
      Check(shape, dtype, DType::kF32, false);
      if (HasFailure()) return;
    }
  }
}

// Tiles in parts of many blocks, and blocks of many tiles.
TEST_F(CudaSkinnyTest, PartsAndTilesMatchDoublePrecision) {
  Check({9, 65, 20000}, DType::kBF16, DType::kBF16, false);
  Check({8, 20000, 200}, DType::kBF16, DType::kBF16, false);
  Check({17, 3000, 1032}, DType::kBF16, DType::kF32, false);
  Check({20, 700, 1500, 4}, DType::kBF16, DType::kF32, false, 100);
  Check({20, 700, 520}, DType::kBF16, DType::kF32, false, 1000);
}

TEST_F(CudaSkinnyTest, SwiGluMatchesDoublePrecision) {
  for (const DType dtype : kTypes) {
    for (const Shape& shape : {Shape{8, 64, 64},
                               {1, 8, 40},
                               {7, 1000, 512},
                               {16, 104, 896, 8},
                               {32, 264, 1024},
                               {24, 72, 4096},
                               {31, 200, 200, 16},
                               {9, 520, 320}}) {
      Check(shape, dtype, dtype, true);
      if (HasFailure()) return;
    }
  }
}

TEST_F(CudaSkinnyTest, RefusesWhatItCannotDo) {
  CudaMatrix x(8, 64, DType::kBF16), many(33, 64, DType::kBF16), y(8, 20, DType::kBF16);
  CudaMatrix weight(20, 64, DType::kBF16), unaligned(20, 64, DType::kBF16, 0, 1);
  CudaMatrix narrow(8, 62, DType::kBF16), narrow_weight(20, 62, DType::kBF16);
  CudaMatrix many_y(33, 20, DType::kBF16), floats(8, 64, DType::kF32), pairs(8, 10, DType::kBF16);
  CudaMatrix float_weight(20, 64, DType::kF32);
  EXPECT_TRUE(CudaSkinny::Takes({x.view(), weight.view(), nullptr, y.view()}));
  EXPECT_FALSE(CudaSkinny::Takes({many.view(), weight.view(), nullptr, many_y.view()}));
  EXPECT_FALSE(CudaSkinny::Takes({x.view(), unaligned.view(), nullptr, y.view()}));
  EXPECT_FALSE(CudaSkinny::Takes({narrow.view(), narrow_weight.view(), nullptr, y.view()}));
  EXPECT_FALSE(CudaSkinny::Takes({floats.view(), float_weight.view(), nullptr, y.view()}));
  EXPECT_FALSE(CudaSkinny::Takes({x.view(), weight.view(), nullptr, pairs.view(), true}));
}

}  // namespace
}  // namespace lockstep
