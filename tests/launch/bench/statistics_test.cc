#include "launch/bench/statistics.h"

#include <gtest/gtest.h>

#include <cmath>

namespace lockstep {
namespace {

TEST(Statistics, OfFourValues) {
  // Ranks of percentiles are 3 * p / 100: p50 lies half way from 2 to 4, p90 at 2.7, p99 at 2.97.
  const Statistics s({4, 1, 11, 2});
  EXPECT_EQ(s.count(), 4);
  EXPECT_DOUBLE_EQ(s.mean(), 4.5);
  EXPECT_DOUBLE_EQ(s.median(), 3);
  // Squares of the distances from 4.5: 0.25 + 12.25 + 42.25 + 6.25 = 61; 61 / 4 = 15.25.
  EXPECT_DOUBLE_EQ(s.std(), std::sqrt(15.25));
  EXPECT_DOUBLE_EQ(s.min(), 1);
  EXPECT_DOUBLE_EQ(s.max(), 11);
  EXPECT_DOUBLE_EQ(s.Percentile(0), 1);
  EXPECT_DOUBLE_EQ(s.Percentile(25), 1.75);
  EXPECT_DOUBLE_EQ(s.Percentile(90), 8.9);
  EXPECT_DOUBLE_EQ(s.Percentile(99), 10.79);
  EXPECT_DOUBLE_EQ(s.Percentile(100), 11);
}

TEST(Statistics, OfOneValueAndOfEqualOnes) {
  const Statistics one({7});
  EXPECT_EQ(one.count(), 1);
  for (const double p : {0.0, 50.0, 99.9, 100.0}) EXPECT_EQ(one.Percentile(p), 7);
  EXPECT_EQ(one.std(), 0);
  // 0.1 has no exact sum.
  const Statistics equal(std::vector<double>(10, 0.1));
  EXPECT_GE(equal.mean(), equal.min());
  EXPECT_LE(equal.mean(), equal.max());
  EXPECT_EQ(equal.Percentile(73), 0.1);
}

TEST(Statistics, MedianOfAnOddNumber) {
  EXPECT_EQ(Statistics({3, 1, 2}).median(), 2);
  EXPECT_EQ(Statistics({5, 3, 1, 2, 4}).Percentile(90), 4.6);
}

TEST(Statistics, AnEmptySampleHasNothing) {
  const Statistics none;
  EXPECT_TRUE(none.empty());
  EXPECT_EQ(DumpJson(StatisticsJson(none)),
            R"({"count":0,"mean":null,"median":null,"std":null,"p90":null,"p99":null,)"
            R"("min":null,"max":null})");
  const StatisticsRow rows[] = {{"step_ms", none}, {"e2e", Statistics({2})}};
  EXPECT_EQ(StatisticsTable(rows),
            "          count       mean     median        std        p90        p99        min"
            "        max\n"
            "step_ms       0          -          -          -          -          -          -"
            "          -\n"
            "e2e           1      2.000      2.000      0.000      2.000      2.000      2.000"
            "      2.000\n");
}

TEST(Statistics, LargeValuesStayInTheirColumns) {
  const StatisticsRow row[] = {{"rate", Statistics({1234567.89})}};
  EXPECT_NE(StatisticsTable(row).find("rate       1  1234567.9  1234567.9      0.000  1234567.9"),
            std::string::npos)
      << StatisticsTable(row);
}

TEST(Statistics, NamesOfPercentiles) {
  EXPECT_EQ(PercentileName(99), "99");
  EXPECT_EQ(PercentileName(99.9), "99.9");
  EXPECT_EQ(PercentileName(0), "0");
}

}  // namespace
}  // namespace lockstep
