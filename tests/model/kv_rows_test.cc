#include "model/kv_rows.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "attention/reference_backend.h"
#include "cache/kv_pool.h"

namespace lockstep {
namespace {

constexpr int64_t kHeads = 3;
constexpr int64_t kDim = 8;
constexpr int64_t kBlockSize = 4;
constexpr int64_t kCols = kHeads * kDim;

KvPool MakePool(DType dtype, int64_t num_blocks) {
  auto pool = KvPool::Create({.num_layers = 1,
                              .num_kv_heads = kHeads,
                              .head_dim = kDim,
                              .block_size = kBlockSize,
                              .dtype = dtype},
                             num_blocks);
  LOCKSTEP_CHECK(pool.ok());
  const KvCacheView cache = pool->Layer(0);
  for (void* half : {cache.keys, cache.values}) {
    std::memset(half, 0x11, num_blocks * kBlockSize * kCols * SizeOf(dtype));
  }
  if (dtype == DType::kF8E4M3) pool->SetScales(0, 0.37f, 1.9f);
  return *std::move(pool);
}

std::vector<char> Bytes(const KvCacheView& cache) {
  const int64_t half = cache.num_blocks * kBlockSize * kCols * SizeOf(cache.dtype);
  std::vector<char> bytes(2 * half);
  std::memcpy(bytes.data(), cache.keys, half);
  std::memcpy(bytes.data() + half, cache.values, half);
  return bytes;
}

TEST(KvRowsTest, TouchedBlocksAreThoseOfTheSlots) {
  const std::vector<int64_t> slots = {30, 31, kNoSlot, 4, 7, 28};
  const TouchedBlocks touched = TouchBlocks(slots, kBlockSize);
  EXPECT_EQ(touched.blocks, (std::vector<int64_t>{1, 7}));
  EXPECT_EQ(touched.slots, (std::vector<int64_t>{6, 7, kNoSlot, 0, 3, 4}));
  EXPECT_TRUE(TouchBlocks({}, kBlockSize).blocks.empty());
}

class KvRowsTypeTest : public testing::TestWithParam<DType> {};

// What a backend has written comes out as it was rounded; put into another cache, it is the same
// bits there, and nothing else changes.
TEST_P(KvRowsTypeTest, RowsComeOutAndGoBack) {
  std::random_device device;
  const uint32_t seed = device();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  const std::vector<int64_t> slots = {9, 2, kNoSlot, 3, 20, 10};
  const int64_t tokens = std::ssize(slots);
  std::vector<float> written(tokens * 2 * kCols);
  for (float& x : written) x = normal(random);
  const MatrixView keys{written.data(), DType::kF32, tokens, kCols, 2 * kCols};
  const MatrixView values{written.data() + kCols, DType::kF32, tokens, kCols, 2 * kCols};
  const KvPool pool = MakePool(GetParam(), 6);
  const std::vector<char> untouched = Bytes(pool.Layer(0));
  ReferenceBackend().WriteKv(keys, values, slots, pool.Layer(0));

  constexpr int64_t kStride = 5 + 2 * kCols;  // beside queries
  std::vector<float> read(tokens * kStride, -1.0f);
  const MatrixView rows{read.data() + 5, DType::kF32, tokens, 2 * kCols, kStride};
  ReadKvRows(pool.Layer(0), slots, rows);
  const double unit = GetParam() == DType::kF32    ? 0
                      : GetParam() == DType::kF16  ? 0x1p-11
                      : GetParam() == DType::kBF16 ? 0x1p-8
                                                   : 0x1p-4;
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t c = 0; c < 5; ++c) EXPECT_EQ(read[t * kStride + c], -1.0f);
    for (int64_t c = 0; c < 2 * kCols; ++c) {
      const float expected = slots[t] == kNoSlot ? 0 : written[t * 2 * kCols + c];
      const double smallest = GetParam() == DType::kF8E4M3 ? 1.9 * 0x1p-10 : 0;  // subnormal
      EXPECT_NEAR(rows.row<float>(t)[c], expected, std::abs(expected) * unit + smallest);
    }
  }

  const KvPool other = MakePool(GetParam(), 6);
  WriteKvRows(rows, slots, other.Layer(0));
  EXPECT_EQ(Bytes(other.Layer(0)), Bytes(pool.Layer(0)));
  EXPECT_NE(Bytes(other.Layer(0)), untouched);
}

INSTANTIATE_TEST_SUITE_P(Types, KvRowsTypeTest,
                         testing::Values(DType::kF32, DType::kBF16, DType::kF16, DType::kF8E4M3),
                         [](const auto& info) { return std::string(Name(info.param)); });

}  // namespace
}  // namespace lockstep
