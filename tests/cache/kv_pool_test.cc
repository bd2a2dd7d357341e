#include "cache/kv_pool.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

namespace lockstep {
namespace {

KvPoolShape Shape(DType dtype) {
  return {.num_layers = 3, .num_kv_heads = 2, .head_dim = 8, .block_size = 4, .dtype = dtype};
}

float At(const KvCacheView& view, const void* data, int64_t i) {
  if (view.dtype == DType::kF32) return static_cast<const float*>(data)[i];
  if (view.dtype == DType::kF8E4M3) return ToFloat(static_cast<const F8E4M3*>(data)[i]);
  if (view.dtype == DType::kF16) return ToFloat(static_cast<const F16*>(data)[i]);
  return ToFloat(static_cast<const BF16*>(data)[i]);
}

TEST(KvPoolTest, LayersLieApartAndFillTheBytesOfTheirBlocks) {
  const auto pool = KvPool::Create(Shape(DType::kBF16), 5);
  ASSERT_TRUE(pool.ok());
  EXPECT_EQ(pool->num_blocks(), 5);
  const int64_t half = 5 * 2 * 4 * 8 * 2;
  EXPECT_EQ(pool->shape().BytesPerBlock() * 5, 3 * 2 * half);
  char* const base = static_cast<char*>(pool->Layer(0).keys);
  for (int64_t layer = 0; layer < 3; ++layer) {
    const KvCacheView view = pool->Layer(layer);
    EXPECT_EQ(static_cast<char*>(view.keys) - base, 2 * layer * half);
    EXPECT_EQ(static_cast<char*>(view.values) - base, (2 * layer + 1) * half);
    EXPECT_EQ(view.num_blocks, 5);
    EXPECT_EQ(view.num_kv_heads, 2);
    EXPECT_EQ(view.block_size, 4);
    EXPECT_EQ(view.head_dim, 8);
    EXPECT_EQ(view.dtype, DType::kBF16);
  }
}

TEST(KvPoolTest, OffsetIsRowMajorBlockHeadOffset) {
  const auto pool = KvPool::Create(Shape(DType::kF32), 5);
  ASSERT_TRUE(pool.ok());
  const KvCacheView view = pool->Layer(0);
  EXPECT_EQ(view.Offset(0, 0, 1), 8);
  EXPECT_EQ(view.Offset(0, 1, 0), 4 * 8);
  EXPECT_EQ(view.Offset(1, 0, 0), 2 * 4 * 8);
  EXPECT_EQ(view.Offset(4, 1, 3), 5 * 2 * 4 * 8 - 8);
}

class KvPoolDTypeTest : public testing::TestWithParam<DType> {};

TEST_P(KvPoolDTypeTest, PoisonFillsOneBlockOfEveryLayerWithNan) {
  auto pool = KvPool::Create(Shape(GetParam()), 5);
  ASSERT_TRUE(pool.ok());
  std::memset(pool->Layer(0).keys, 0, pool->shape().BytesPerBlock() * 5);
  LOCKSTEP_CHECK(pool->Poison(3).ok());
  for (int64_t layer = 0; layer < 3; ++layer) {
    const KvCacheView view = pool->Layer(layer);
    for (int64_t i = 0; i < 5 * 2 * 4 * 8; ++i) {
      const bool poisoned = i / (2 * 4 * 8) == 3;
      ASSERT_EQ(std::isnan(At(view, view.keys, i)), poisoned) << layer << " " << i;
      ASSERT_EQ(std::isnan(At(view, view.values, i)), poisoned) << layer << " " << i;
    }
  }
}

TEST_P(KvPoolDTypeTest, CopyCopiesOneBlockOfEveryLayer) {
  auto pool = KvPool::Create(Shape(GetParam()), 5);
  ASSERT_TRUE(pool.ok());
  std::memset(pool->Layer(0).keys, 0, pool->shape().BytesPerBlock() * 5);
  LOCKSTEP_CHECK(pool->Poison(3).ok());
  LOCKSTEP_CHECK(pool->Copy(3, 1).ok());
  LOCKSTEP_CHECK(pool->Copy(0, 3).ok());
  for (int64_t layer = 0; layer < 3; ++layer) {
    const KvCacheView view = pool->Layer(layer);
    for (int64_t i = 0; i < 5 * 2 * 4 * 8; ++i) {
      const bool poisoned = i / (2 * 4 * 8) == 1;
      ASSERT_EQ(std::isnan(At(view, view.keys, i)), poisoned) << layer << " " << i;
      ASSERT_EQ(std::isnan(At(view, view.values, i)), poisoned) << layer << " " << i;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(DTypes, KvPoolDTypeTest,
                         testing::Values(DType::kF32, DType::kF16, DType::kBF16, DType::kF8E4M3));

TEST(KvPoolTest, AnFp8PoolHasAByteAnElementAndScalesOfItsLayers) {
  auto pool = KvPool::Create(Shape(DType::kF8E4M3), 5);
  ASSERT_TRUE(pool.ok());
  EXPECT_EQ(pool->shape().BytesPerBlock(), 2 * 3 * 2 * 4 * 8);
  pool->SetScales(1, 0.5f, 2);
  EXPECT_EQ(pool->Layer(0).k_scale, 1);
  EXPECT_EQ(pool->Layer(0).v_scale, 1);
  EXPECT_EQ(pool->Layer(1).k_scale, 0.5f);
  EXPECT_EQ(pool->Layer(1).v_scale, 2);
}

TEST(KvPoolTest, MovingKeepsViewsValid) {
  auto pool = KvPool::Create(Shape(DType::kF32), 2);
  ASSERT_TRUE(pool.ok());
  const void* keys = pool->Layer(1).keys;
  const KvPool moved = *std::move(pool);
  EXPECT_EQ(moved.Layer(1).keys, keys);
}

TEST(KvPoolTest, RefusesSizesBelowOneAndTooMuchMemory) {
  EXPECT_EQ(KvPool::Create(Shape(DType::kF32), 0).status().code(),
            absl::StatusCode::kInvalidArgument);
  KvPoolShape shape = Shape(DType::kF32);
  shape.num_kv_heads = 0;
  EXPECT_EQ(KvPool::Create(shape, 1).status().code(), absl::StatusCode::kInvalidArgument);
  shape = Shape(DType::kF32);
  shape.head_dim = int64_t{1} << 40;
  EXPECT_EQ(KvPool::Create(shape, 1 << 20).status().code(), absl::StatusCode::kResourceExhausted);
}

TEST(KvPoolDeathTest, OutOfRangeIsABug) {
  auto pool = KvPool::Create(Shape(DType::kF32), 2);
  ASSERT_TRUE(pool.ok());
  EXPECT_DEATH(pool->Layer(3), "num_layers");
  EXPECT_DEATH(pool->Poison(2).IgnoreError(), "num_blocks");
}

}  // namespace
}  // namespace lockstep
