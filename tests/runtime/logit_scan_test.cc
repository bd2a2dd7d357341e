#include "runtime/logit_scan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "runtime/gumbel_race.h"
#include "runtime/softmax_mass.h"

namespace lockstep {
namespace {

constexpr VectorIsa kIsas[] = {VectorIsa::kPortable, VectorIsa::kAvx2, VectorIsa::kAvx512};

class LogitScanTest : public testing::TestWithParam<VectorIsa> {
 protected:
  void SetUp() override {
    if (GetParam() > BestVectorIsa()) GTEST_SKIP() << "not on this CPU";
    SetVectorIsa(GetParam());
  }
  void TearDown() override { SetVectorIsa(BestVectorIsa()); }
};

// A row with what its slice points to; the allocation ends with the row.
struct Row {
  std::vector<float> logits;
  std::vector<float> block_max;
  LogitSlice slice;

  explicit Row(std::vector<float> values, int64_t first_id = 7) : logits(std::move(values)) {
    const auto count = static_cast<int64_t>(logits.size());
    block_max.resize(static_cast<size_t>(NumScanBlocks(count)));
    ScanMax(logits.data(), count, block_max.data());
    slice = {logits.data(), block_max.data(), {first_id, first_id + count}};
  }
};

// Of many lengths, with ties, zeros of both signs and masked ids.
std::vector<Row> RandomRows() {
  std::vector<Row> rows;
  std::mt19937 random(1);
  for (const size_t count : {1, 5, 63, 64, 65, 200, 4096, 40001}) {
    for (const float spread : {0.02f, 1.0f, 30.0f}) {
      std::normal_distribution<float> normal(0, spread);
      std::vector<float> logits(count);
      for (float& x : logits) {
        x = normal(random);
        if (random() % 4 == 0) x = std::round(x);
        if (random() % 50 == 0) x = kMinusInfinity;
        if (random() % 50 == 0) x = random() % 2 == 0 ? 0.0f : -0.0f;
      }
      logits[random() % count] = 0.25f;
      rows.emplace_back(std::move(logits));
    }
  }
  return rows;
}

TEST_P(LogitScanTest, MaxSeesFaultsAtEveryPlace) {
  for (const int64_t count : {1, 16, 63, 64, 65, 130}) {
    std::vector<float> block_max(3);
    for (int64_t i = 0; i < count; ++i) {
      std::vector<float> x(static_cast<size_t>(count), -2.0f);
      x[i] = -1;
      EXPECT_EQ(ScanMax(x.data(), count, block_max.data()), -1);
      EXPECT_EQ(block_max[i / kScanBlock], -1);
      for (const float bad : {std::nanf(""), std::numeric_limits<float>::infinity()}) {
        x[i] = bad;
        EXPECT_TRUE(std::isnan(ScanMax(x.data(), count, block_max.data())));
      }
    }
  }
  EXPECT_EQ(ScanMax(nullptr, 0, nullptr), kMinusInfinity);
}

TEST_P(LogitScanTest, SelectTopEqualsASort) {
  for (const Row& row : RandomRows()) {
    std::vector<LogitAndId> sorted;
    for (size_t i = 0; i < row.logits.size(); ++i) {
      sorted.push_back({row.logits[i], static_cast<int32_t>(i + 7)});
    }
    std::sort(sorted.begin(), sorted.end(), Better);
    for (const size_t k : {0, 1, 2, 60, 160, 5000}) {
      std::vector<LogitAndId> top(k, {99, 99});
      const int64_t count = SelectTop(row.slice, top);
      ASSERT_EQ(count, static_cast<int64_t>(std::min(k, sorted.size())));
      for (int64_t i = 0; i < count; ++i) {
        ASSERT_EQ(top[i].id, sorted[i].id);
        ASSERT_EQ(top[i].logit, sorted[i].logit);
      }
    }
  }
}

TEST_P(LogitScanTest, HistogramsEqualTheSumsOfTheirIds) {
  std::mt19937 random(2);
  for (const Row& row : RandomRows()) {
    const float max = *std::max_element(row.logits.begin(), row.logits.end());
    const double scale = MassScale(random() % 2 == 0 ? 1 : 0.3);
    const MassBuckets buckets{.scale = scale, .top = MassStep(max, scale)};
    MassHistogram histogram, expected = {};
    std::memset(&histogram, 0xab, sizeof(histogram));
    FillMassHistogram(row.slice, buckets, histogram);
    for (const float x : row.logits) {
      const int bucket = buckets.bucket(x);
      ++expected.count[bucket];
      if (bucket < kMassBuckets) expected.mantissas[bucket] += Mantissa(x, scale);
    }
    ASSERT_EQ(std::memcmp(&histogram, &expected, sizeof(histogram)), 0);

    const float other = row.logits[random() % row.logits.size()];
    const uint32_t low = std::min(OrderKey(0.1f), OrderKey(other));
    const uint32_t high = std::max(OrderKey(0.1f), OrderKey(other));
    const KeyCells cells{.low = low, .high = high, .shift = 23};
    const Survivors survivors{.floor = OrderKey(-1.0f),
                              .tie_end = static_cast<int64_t>(row.logits.size() / 2)};
    CellHistogram cell_histogram, cells_expected = {};
    std::vector<int32_t> ids;
    FillCellHistogram(row.slice, cells, survivors, scale, cell_histogram);
    for (size_t i = 0; i < row.logits.size(); ++i) {
      const uint32_t key = OrderKey(row.logits[i]);
      if (key < low || key > high || key < survivors.floor) continue;
      if (key == survivors.floor && static_cast<int64_t>(i) >= survivors.tie_end) continue;
      ++cells_expected.count[cells.cell(key)];
      cells_expected.mantissas[cells.cell(key)] += Mantissa(row.logits[i], scale);
      ids.push_back(static_cast<int32_t>(i + 7));
    }
    ASSERT_EQ(std::memcmp(&cell_histogram, &cells_expected, sizeof(cell_histogram)), 0);
    std::vector<LogitAndId> found(row.logits.size());
    ASSERT_EQ(CollectRange(row.slice, low, high, survivors, found),
              static_cast<int64_t>(ids.size()));
    for (const int32_t id : ids) {
      EXPECT_TRUE(std::any_of(found.begin(), found.end(),
                              [&](const LogitAndId& entry) { return entry.id == id; }));
    }
    int64_t ones = 0;
    for (size_t i = 0; i < row.logits.size(); ++i) {
      if (row.logits[i] != 1) continue;
      EXPECT_EQ(FindTieEnd(row.slice, OrderKey(1), ++ones), static_cast<int64_t>(i + 1));
      if (ones > 20) break;
    }
  }
}

TEST_P(LogitScanTest, MassesFollowExp) {
  std::mt19937 random(3);
  std::uniform_real_distribution<float> logit(-15, 25);
  for (int i = 0; i < 20000; ++i) {
    const double scale = MassScale(1.3);
    const float x = logit(random), max = 25;
    const double expected = std::exp((double{x} - max) / 1.3);
    EXPECT_NEAR(RelativeMass(x, max, scale) / expected, 1, 1e-10);
    const MassBuckets buckets{.scale = scale, .top = MassStep(max, scale)};
    const double mass =
        static_cast<double>(buckets.mass(x)) / static_cast<double>(buckets.mass(max));
    EXPECT_NEAR(mass / expected, 1, 4e-8);  // the units of steps are rounded to 2^-26
  }
}

TEST_P(LogitScanTest, RaceEqualsTheArgmax) {
  std::mt19937 random(4);
  for (const Row& row : RandomRows()) {
    const Survivors survivors[] = {
        {}, {.floor = OrderKey(-1.0f), .tie_end = static_cast<int64_t>(row.logits.size() / 2)}};
    for (const Survivors& s : survivors) {
      for (int32_t position = 0; position < 20; ++position) {
        RaceResult best;
        for (size_t i = 0; i < row.logits.size(); ++i) {
          const uint32_t key = OrderKey(row.logits[i]);
          if (key < s.floor || (key == s.floor && static_cast<int64_t>(i) >= s.tie_end)) continue;
          const double score =
              row.logits[i] * 1.25 + GumbelNoise(9, position, static_cast<int64_t>(i) + 7);
          if (score > best.score) best = {score, static_cast<int32_t>(i) + 7};
        }
        const RaceResult result = GumbelRace(row.slice, s, 9, position, 1.25);
        ASSERT_EQ(result.id, best.id);
        ASSERT_EQ(result.score, best.score);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Isas, LogitScanTest, testing::ValuesIn(kIsas));

// Scalar calls above use the portable code, so equal results mean equal bits on all of them.

TEST(OrderKeyTest, IsMonotonicAndInvertible) {
  const float values[] = {kMinusInfinity, -3e38f, -1.5f, -1e-45f, 0.0f, 1e-45f, 1.0f, 2.0f, 3e38f};
  for (size_t i = 0; i < std::size(values); ++i) {
    EXPECT_EQ(FromOrderKey(OrderKey(values[i])), values[i]);
    EXPECT_TRUE(i == 0 || OrderKey(values[i - 1]) < OrderKey(values[i]));
  }
  EXPECT_EQ(OrderKey(-0.0f), OrderKey(0.0f));
  EXPECT_EQ(OrderKey(kMinusInfinity), kLowestKey);
}

}  // namespace
}  // namespace lockstep
