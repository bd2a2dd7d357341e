// Norm, rotation and the write to the cache on the GPU against double precision: every pair of
// dtypes, on a poisoned cache of which only the given slots may change.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <tuple>
#include <vector>

#include "model/cuda_ops.h"
#include "tests/model/cuda_test_util.h"

namespace lockstep {
namespace {

constexpr float kEps = 1e-5f;
constexpr int64_t kPositions = 20;  // of the tables of angles

struct HeadsCase {
  int64_t queries, keys, head_dim, rotary_dim;
  bool q_norm, k_norm, by_position;
  int64_t offset;  // of qkv, in elements: 1 is not aligned
  int64_t cache_offset = 0;
  int64_t block_size = 4;
};

const HeadsCase kCases[] = {
    {28, 4, 128, 128, false, false, true, 0},
    {14, 2, 128, 128, false, false, true, 0},
    {16, 8, 128, 128, true, true, true, 0},
    {9, 3, 64, 64, false, false, false, 0, 0, 3},
    {3, 1, 256, 256, true, true, false, 0, 0, 16},
    {4, 2, 128, 64, true, false, true, 0},
    {4, 2, 128, 64, false, false, true, 0},
    {4, 2, 80, 32, false, true, true, 0, 0, 1},
    {5, 2, 96, 96, true, true, true, 0},
    {3, 1, 10, 6, true, true, true, 0},
    {2, 2, 6, 2, false, false, true, 0},
    {3, 2, 128, 128, true, true, true, 1},
    {3, 2, 128, 128, true, true, true, 0, 1},
    {2, 1, 320, 320, true, true, true, 0, 0, 5},
    {2, 1, 514, 514, true, true, true, 0},
    {40, 40, 64, 64, true, true, true, 0},
    {4, 1, 64, 0, true, true, true, 0},
    {4, 1, 64, 0, false, false, true, 0},
    {1, 1, 2, 2, true, true, true, 0},
};

// qkv after norm and rotation, in double, and the magnitudes that met in each element.
struct Reference {
  std::vector<std::vector<double>> rows;
  std::vector<std::vector<double>> magnitudes;
};

void Turn(const HeadsCase& test, const double* cos, const double* sin, double* head,
          double* magnitude) {
  const int64_t half = test.rotary_dim / 2;
  for (int64_t d = 0; d < test.head_dim; ++d) magnitude[d] = std::abs(head[d]);
  for (int64_t d = 0; d < half; ++d) {
    const double a = head[d], b = head[d + half];
    head[d] = a * cos[d] - b * sin[d];
    head[d + half] = b * cos[d] + a * sin[d];
    magnitude[d] = magnitude[d + half] = std::abs(a) + std::abs(b);
  }
}

std::vector<double> RowOf(const CudaMatrix& x, int64_t r) {
  std::vector<double> row(x.cols());
  for (int64_t c = 0; c < x.cols(); ++c) row[c] = x.At(r, c);
  return row;
}

Reference MakeReference(const HeadsCase& test, const CudaMatrix& qkv, const CudaMatrix& q_weight,
                        const CudaMatrix& k_weight, const CudaMatrix& cos, const CudaMatrix& sin,
                        const std::vector<int32_t>& positions) {
  Reference reference;
  for (int64_t t = 0; t < qkv.rows(); ++t) {
    std::vector<double> row = RowOf(qkv, t);
    std::vector<double> magnitude(row.size());
    const int64_t angles = test.by_position ? positions[t] : t;
    const std::vector<double> row_cos = RowOf(cos, angles), row_sin = RowOf(sin, angles);
    for (int64_t h = 0; h < test.queries + test.keys; ++h) {
      double* const head = row.data() + h * test.head_dim;
      const bool is_query = h < test.queries;
      if (is_query ? test.q_norm : test.k_norm) {
        double squares = 0;
        for (int64_t d = 0; d < test.head_dim; ++d) squares += head[d] * head[d];
        const double scale = 1 / std::sqrt(squares / static_cast<double>(test.head_dim) + kEps);
        for (int64_t d = 0; d < test.head_dim; ++d) {
          head[d] *= scale * (is_query ? q_weight : k_weight).At(0, d);
        }
      }
      Turn(test, row_cos.data(), row_sin.data(), head, magnitude.data() + h * test.head_dim);
    }
    reference.rows.push_back(std::move(row));
    reference.magnitudes.push_back(std::move(magnitude));
  }
  return reference;
}

// Dtype of qkv, of the cache, programmatic_launch.
class CudaRopeTest : public CudaTest,
                     public testing::WithParamInterface<std::tuple<DType, DType, bool>> {
 protected:
  DType dtype() const { return std::get<0>(GetParam()); }
  DType cache_dtype() const { return std::get<1>(GetParam()); }
  CudaContext Ctx() { return Context(std::get<2>(GetParam())); }

  bool is_fp8() const { return cache_dtype() == DType::kF8E4M3; }
  // Some numbers are beyond fp8's range.
  float k_scale() const { return is_fp8() ? 0.007f : 1; }
  float v_scale() const { return is_fp8() ? 0.005f : 1; }

  // What the cache holds of a key: fp8 numbers have steps of 2^-9 at least, and end at 448.
  void ExpectKey(double stored, double expected, double magnitude, const std::string& where) {
    if (!is_fp8()) return ExpectNear(cache_dtype(), stored, expected, magnitude, where);
    const double scale = double{k_scale()};
    const double clamped = std::clamp(expected / scale, -448.0, 448.0);
    const double tolerance =
        std::max(RoundingOf(cache_dtype()) * std::abs(clamped), 0x1p-10) + 2e-6 * magnitude / scale;
    EXPECT_NEAR(stored, clamped, tolerance) << where;
  }

  // Computed in float32 from terms of this magnitude, and rounded once.
  static void ExpectNear(DType dtype, double value, double expected, double magnitude,
                         const std::string& where) {
    const double tolerance =
        1.01 * RoundingOf(dtype) * std::abs(expected) + 2e-6 * magnitude + 1e-7;
    EXPECT_NEAR(value, expected, tolerance) << where;
  }

  // The cache's rows are [blocks, Hkv, P]; those of slots hold `expected` heads, others are
  // untouched. Values are compared bit for bit.
  void ExpectCache(const HeadsCase& test, const std::vector<int64_t>& slots,
                   const Reference& reference, const CudaMatrix& keys, const CudaMatrix& values) {
    std::vector<bool> written(keys.rows());
    for (size_t t = 0; t < slots.size(); ++t) {
      if (slots[t] == kNoSlot) continue;
      for (int64_t h = 0; h < test.keys; ++h) {
        const int64_t row = (slots[t] / test.block_size * test.keys + h) * test.block_size +
                            slots[t] % test.block_size;
        written[row] = true;
        CudaMatrix expected_value(1, test.head_dim, cache_dtype());
        for (int64_t d = 0; d < test.head_dim; ++d) {
          const int64_t k = (test.queries + h) * test.head_dim + d;
          const int64_t v = k + test.keys * test.head_dim;
          ExpectKey(keys.At(row, d), reference.rows[t][k], reference.magnitudes[t][k],
                    absl::StrFormat("token %d, key head %d, dim %d", t, h, d));
          expected_value.Set(0, d, static_cast<float>(reference.rows[t][v]) / v_scale());
        }
        EXPECT_TRUE(values.RowBits(row) == expected_value.RowBits(0))
            << "token " << t << ", value head " << h;
      }
    }
    for (int64_t row = 0; row < keys.rows(); ++row) {
      if (written[row]) continue;
      const std::string poison(test.head_dim * SizeOf(cache_dtype()), '\xff');
      EXPECT_TRUE(keys.RowBits(row) == poison && values.RowBits(row) == poison)
          << "row " << row << " is no slot's";
    }
  }

  void ExpectMatches(const HeadsCase& test) {
    const std::vector<int32_t> positions = {4, 0, 19, 19, 7};
    const int64_t tokens = std::ssize(positions);
    const int64_t half = std::max<int64_t>(1, test.rotary_dim / 2);
    const int64_t blocks = 24 / test.block_size;
    const std::vector<int64_t> slots = {9, kNoSlot, 0, blocks * test.block_size - 1, 2};
    CudaMatrix qkv(tokens, (test.queries + 2 * test.keys) * test.head_dim, dtype(), 8, test.offset);
    CudaMatrix q_weight(1, test.head_dim, DType::kF32), k_weight(1, test.head_dim, DType::kF32);
    CudaMatrix cos(kPositions, half, DType::kF32), sin(kPositions, half, DType::kF32);
    CudaMatrix keys(blocks * test.keys * test.block_size, test.head_dim, cache_dtype(), 0,
                    test.cache_offset);
    CudaMatrix values(blocks * test.keys * test.block_size, test.head_dim, cache_dtype(), 0,
                      test.cache_offset);
    qkv.Fill(11, stream());
    q_weight.Fill(12, stream(), 0.5f, 1);
    k_weight.Fill(13, stream(), 0.5f, 1);
    cos.Fill(14, stream());
    sin.Fill(15, stream());
    const Reference reference = MakeReference(test, qkv, q_weight, k_weight, cos, sin, positions);
    const CudaIndices device_positions(positions, stream());
    const CudaSlots device_slots(slots, stream());
    const CudaContext context = Ctx();
    EXPECT_STATUS_OK(NormRopeWriteKv(
        qkv.view(), test.queries,
        {test.q_norm ? q_weight.f32() : nullptr, test.k_norm ? k_weight.f32() : nullptr, kEps},
        {cos.f32(), sin.f32(), test.by_position ? device_positions.get() : nullptr,
         test.rotary_dim},
        device_slots.get(),
        {.keys = keys.view().data,
         .values = values.view().data,
         .dtype = cache_dtype(),
         .num_blocks = blocks,
         .num_kv_heads = test.keys,
         .block_size = test.block_size,
         .head_dim = test.head_dim,
         .k_scale = k_scale(),
         .v_scale = v_scale()},
        context));
    std::vector<std::vector<double>> before;
    for (int64_t t = 0; t < tokens; ++t) before.push_back(RowOf(qkv, t));
    for (CudaMatrix* m : {&qkv, &keys, &values}) m->Download(stream());
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t c = 0; c < qkv.cols(); ++c) {
        if (c >= test.queries * test.head_dim) {
          ASSERT_EQ(qkv.At(t, c), before[t][c]) << "a key or value was changed in place";
        } else {
          ExpectNear(dtype(), qkv.At(t, c), reference.rows[t][c], reference.magnitudes[t][c],
                     absl::StrFormat("token %d, column %d", t, c));
        }
      }
    }
    ExpectCache(test, slots, reference, keys, values);
  }
};

TEST_P(CudaRopeTest, MatchesDoublePrecisionAndWritesItsSlotsOnly) {
  for (const HeadsCase& test : kCases) {
    SCOPED_TRACE(absl::StrFormat("%d + %d heads of %d dims, %d turn, offsets %d and %d, blocks %d",
                                 test.queries, test.keys, test.head_dim, test.rotary_dim,
                                 test.offset, test.cache_offset, test.block_size));
    ExpectMatches(test);
    if (HasFailure()) return;
  }
}

TEST_P(CudaRopeTest, NoRows) {
  const MatrixView none = {nullptr, dtype(), 0, 128, 128};
  EXPECT_STATUS_OK(NormRopeWriteKv(none, 2, {}, {nullptr, nullptr, nullptr, 32}, nullptr,
                                   {.dtype = cache_dtype(),
                                    .num_blocks = 1,
                                    .num_kv_heads = 1,
                                    .block_size = 16,
                                    .head_dim = 32},
                                   Ctx()));
}

INSTANTIATE_TEST_SUITE_P(DTypes, CudaRopeTest,
                         testing::Combine(testing::Values(DType::kF32, DType::kBF16, DType::kF16),
                                          testing::Values(DType::kF32, DType::kBF16, DType::kF16,
                                                          DType::kF8E4M3),
                                          testing::Bool()),
                         [](const auto& info) {
                           return std::string(Name(std::get<0>(info.param))) + "_to_" +
                                  std::string(Name(std::get<1>(info.param))) +
                                  (std::get<2>(info.param) ? "_programmatic" : "");
                         });

}  // namespace
}  // namespace lockstep
