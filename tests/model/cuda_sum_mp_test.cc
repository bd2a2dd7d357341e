// The sum over ranks in one kernel, against sums made on the host, bit for bit, and the forms of it
// against each other.
#include <unistd.h>

#include <thread>
#include <utility>

#include "tests/model/cuda_sum_fixture.h"

namespace lockstep {
namespace {

// Row r of `out` is the norm of row rows[r] of `sum`.
void ExpectNorms(const std::vector<float>& out, const std::vector<float>& sum,
                 const std::vector<int32_t>& rows, const std::vector<float>& weight, DType dtype) {
  const int64_t cols = static_cast<int64_t>(weight.size());
  const double rounding = dtype == DType::kBF16  ? 1.0 / 256
                          : dtype == DType::kF16 ? 1.0 / 2048
                                                 : 1e-6;
  for (size_t r = 0; r < rows.size(); ++r) {
    const float* row = sum.data() + rows[r] * cols;
    double squares = 0;
    for (int64_t c = 0; c < cols; ++c) squares += double{row[c]} * row[c];
    const double scale = 1 / std::sqrt(squares / static_cast<double>(cols) + double{kSumEps});
    for (int64_t c = 0; c < cols; ++c) {
      const double expected = row[c] * scale * weight[c];
      ASSERT_NEAR(out[r * cols + c], expected, 1.01 * rounding * std::abs(expected) + 1e-6)
          << "row " << r << ", column " << c << " of " << cols;
    }
  }
}

const char* PathName(SumPath path) { return path == SumPath::kOneShot ? "one-shot" : "two-shot"; }

// A residual stream, and what comes of it.
class SumResultTest : public SumTest {
 protected:
  struct Shape {
    DType dtype;
    int64_t rows;
    int64_t cols;
    int64_t count() const { return rows * cols; }
    int64_t bytes() const { return count() * SizeOf(dtype); }
  };
  struct Result {
    std::vector<float> residual;
    std::vector<float> out;
  };

  void Prepare(const Shape& shape) {
    shape_ = shape;
    before_ = Numbers(0, shape.count(), shape.dtype, kResidualSeed);
    weight_ = Numbers(0, shape.cols, DType::kF32, kResidualSeed);
    device_weight_ = Device(weight_, DType::kF32);
  }

  // The parts of `seed` in a window of its own by turns, then the sum in so many pieces.
  Result Run(SumPath path, ResidualUse use, const std::vector<int32_t>* wanted, uint32_t seed,
             int max_blocks, int pieces, bool programmatic) {
    const DType dtype = shape_.dtype;
    const int64_t rows = shape_.rows, cols = shape_.cols;
    const DeviceBuffer residual = Device(before_, dtype), own_out = Device(before_, dtype);
    std::vector<int32_t> list = wanted == nullptr ? std::vector<int32_t>() : *wanted;
    list.push_back(0);  // never empty
    const DeviceBuffer device_wanted = Device(list);
    OR_ABORT(FillBytesAsync(own_out.data(), 0xff, shape_.bytes(), stream()));
    const DeviceBuffer part = Device(Numbers(job->rank(), shape_.count(), dtype, seed), dtype);
    window_ = (window_ + 1) % 2;
    OR_ABORT(CopyAsync(peers_->window(window_), part.data(), shape_.bytes(), stream()));
    MatrixView out = {own_out.data(), dtype, rows, cols, cols};
    if (wanted != nullptr) out.rows = static_cast<int64_t>(wanted->size());
    if (path == SumPath::kTwoShot) out.data = peers_->window(wanted == nullptr ? window_ : 2);
    for (int64_t piece = 0; piece < pieces; ++piece) {
      const PeerSum sum = {
          .path = path,
          .window = window_,
          .rows = {rows * piece / pieces, rows * (piece + 1) / pieces},
          .use = use,
          .wanted = wanted == nullptr ? nullptr : device_wanted.as<const int32_t>(),
          .max_blocks = max_blocks};
      OR_ABORT(SumAddRmsNorm(*peers_, sum, {residual.data(), dtype, rows, cols, cols},
                             device_weight_.as<const float>(), kSumEps, out,
                             Context(programmatic)));
    }
    return {Host(residual.data(), shape_.count(), dtype), Host(out.data, out.rows * cols, dtype)};
  }
  // The residual stream behind a sum that made it `sum`: two-shot, in the rows dealt to this rank.
  std::vector<float> Residual(SumPath path, const std::vector<float>& sum) const {
    std::vector<float> residual = before_;
    for (int64_t i = 0; i < shape_.count(); ++i) {
      const bool own = RankOfSumRow(i / shape_.cols, job->size()) == job->rank();
      if (own || path == SumPath::kOneShot) residual[i] = sum[i];
    }
    return residual;
  }

  Shape shape_ = {};
  std::vector<float> before_, weight_;
  DeviceBuffer device_weight_;
  int window_ = 0;
};

TEST_F(SumResultTest, MatchesSumsOnTheHost) {
  uint32_t seed = 0;
  for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
    for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{1, 8},
                                     {1, 3584},
                                     {3, 576},
                                     {7, 4096},
                                     {130, 3584},
                                     {300, 64},
                                     {2, 8192}}) {
      ASSERT_TRUE(SumAddRmsNormSupports(cols, dtype));
      Prepare({dtype, rows, cols});
      std::vector<int32_t> all(rows), some = {static_cast<int32_t>(rows - 1), 0};
      some.resize(std::min<int64_t>(rows, 2));
      for (int64_t r = 0; r < rows; ++r) all[r] = static_cast<int32_t>(r);
      for (const SumPath path : {SumPath::kOneShot, SumPath::kTwoShot}) {
        for (const bool programmatic : {false, true}) {
          for (const int mode : {0, 1, 2}) {  // adds, replaces, some rows
            const ResidualUse use = mode == 1 ? ResidualUse::kReplace : ResidualUse::kAdd;
            const Result got = Run(path, use, mode == 2 ? &some : nullptr, ++seed, kMaxPeerBlocks,
                                   1, programmatic);
            const std::vector<float> expected =
                Sum(shape_.count(), dtype, seed, mode == 1 ? nullptr : &before_);
            const std::string what =
                absl::StrFormat("%s %s [%d, %d], mode %d, programmatic %d", PathName(path),
                                Name(dtype), rows, cols, mode, programmatic);
            ExpectSame(got.residual, mode == 2 ? before_ : Residual(path, expected), what);
            SCOPED_TRACE(what);
            ExpectNorms(got.out, expected, mode == 2 ? some : all, weight_, dtype);
          }
        }
      }
    }
  }
}

// Rows that are fewer than ranks, as many as blocks, more than that; vectors in all numbers a
// thread.
TEST_F(SumResultTest, TheSameBitsWithEveryPathNumberOfBlocksAndPieces) {
  uint32_t seed = 1000;
  std::vector<Shape> shapes = {{DType::kBF16, 1, 3584}, {DType::kBF16, 150, 3584}};
  if (!OnOneGpu()) {
    shapes.insert(shapes.end(), {{DType::kBF16, 2, 64},
                                 {DType::kBF16, 1025, 3584},
                                 {DType::kBF16, 260, 8192},
                                 {DType::kBF16, 130, 16384},
                                 {DType::kF16, 700, 1024},
                                 {DType::kF32, 270, 3584},
                                 {DType::kF32, 40, 8192}});
  }
  for (const Shape& shape : shapes) {
    ASSERT_LE(shape.bytes(), kSumWindowBytes);
    Prepare(shape);
    std::vector<int32_t> wanted;  // some twice
    for (int64_t r = 0; r < shape.rows; ++r) {
      wanted.push_back(static_cast<int32_t>(r * 7919 % shape.rows / 2));
    }
    for (const bool chosen : {false, true}) {
      const std::vector<int32_t>* rows = chosen ? &wanted : nullptr;
      ++seed;
      const Result expected =
          Run(SumPath::kOneShot, ResidualUse::kAdd, rows, seed, kMaxPeerBlocks, 1, true);
      const std::vector<float> sum = Sum(shape.count(), shape.dtype, seed, &before_);
      ExpectSame(expected.residual, chosen ? before_ : sum, "one-shot");
      for (const SumPath path : {SumPath::kOneShot, SumPath::kTwoShot}) {
        for (const auto& [max_blocks, pieces] :
             {std::pair<int, int>{kMaxPeerBlocks, 1}, {kMaxPeerBlocks, 3}, {1, 1}, {9, 2}}) {
          if (OnOneGpu() && max_blocks != 9) continue;
          const Result got = Run(path, ResidualUse::kAdd, rows, seed, max_blocks, pieces, true);
          const std::string what = absl::StrFormat(
              "%s %s [%d, %d], %d blocks, %d pieces, chosen rows %d", PathName(path),
              Name(shape.dtype), shape.rows, shape.cols, max_blocks, pieces, chosen);
          ExpectSame(got.out, expected.out, what);
          ExpectSame(got.residual, chosen ? before_ : Residual(path, sum), what);
          if (HasFatalFailure()) OR_ABORT(absl::InternalError("wrong sums"));
        }
      }
    }
  }
}

TEST_F(SumResultTest, NoRowsAtAll) {
  Prepare({DType::kBF16, 5, 64});
  const std::vector<int32_t> none;
  for (const SumPath path : {SumPath::kOneShot, SumPath::kTwoShot}) {
    for (int i = 0; i < 3; ++i) {
      const Result got =
          Run(path, ResidualUse::kAdd, &none, 2000 + i, kMaxPeerBlocks, 1, i % 2 == 0);
      ExpectSame(got.residual, before_, PathName(path));
      EXPECT_TRUE(got.out.empty());
    }
  }
}

TEST_F(SumTest, AbortFreesWhoWaits) {
  const DeviceBuffer weight = Device(std::vector<float>(8, 1), DType::kF32);
  const DeviceBuffer residual = Device(std::vector<float>(8, 1), DType::kBF16);
  const MatrixView row = {residual.data(), DType::kBF16, 1, 8, 8};
  MatrixView in_window = row;
  in_window.data = peers_->window(1);
  if (job->rank() > 0) {  // rank 0 never comes
    OR_ABORT(SumAddRmsNorm(*peers_, {.window = 0, .rows = {0, 1}}, row, weight.as<const float>(),
                           kSumEps, row, Context(false)));
    OR_ABORT(SumAddRmsNorm(*peers_, {.path = SumPath::kTwoShot, .window = 1, .rows = {0, 1}}, row,
                           weight.as<const float>(), kSumEps, in_window, Context(false)));
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
