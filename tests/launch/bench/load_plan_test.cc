// What is drawn before a benchmark starts: lengths, ids, arrivals.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <set>

#include "launch/bench/arrival_schedule.h"
#include "launch/bench/length_distribution.h"
#include "launch/bench/random_prompts.h"

namespace lockstep {
namespace {

LengthDistribution Parse(const std::string& text) {
  const absl::StatusOr<LengthDistribution> distribution = ParseLengthDistribution(text);
  EXPECT_TRUE(distribution.ok()) << distribution.status();
  return distribution.ok() ? *distribution : LengthDistribution();
}

std::vector<int64_t> Draw(const std::string& kind, int64_t length, int count, uint64_t seed = 1) {
  std::mt19937_64 random(seed);
  std::vector<int64_t> lengths;
  for (int i = 0; i < count; ++i) lengths.push_back(DrawLength(Parse(kind), length, random));
  return lengths;
}

double Mean(const std::vector<int64_t>& values) {
  return static_cast<double>(std::accumulate(values.begin(), values.end(), int64_t{0})) /
         static_cast<double>(values.size());
}

TEST(Lengths, Fixed) { EXPECT_EQ(Draw("fixed", 17, 3), (std::vector<int64_t>{17, 17, 17})); }

TEST(Lengths, UniformStaysInItsRangeAndReachesItsEnds) {
  // 5 * (1 - 0.5) = 2.5 and 5 * 1.5 = 7.5: 2 to 8.
  const std::vector<int64_t> lengths = Draw("uniform:0.5", 5, 2000);
  EXPECT_EQ(std::set<int64_t>(lengths.begin(), lengths.end()),
            (std::set<int64_t>{2, 3, 4, 5, 6, 7, 8}));
  EXPECT_EQ(Draw("uniform:0", 5, 2), (std::vector<int64_t>{5, 5}));
  const std::vector<int64_t> wide = Draw("uniform:1", 2, 500);
  EXPECT_EQ(*std::min_element(wide.begin(), wide.end()), 1);
  EXPECT_EQ(*std::max_element(wide.begin(), wide.end()), 4);
}

TEST(Lengths, LognormalHasTheMeanThatIsAskedFor) {
  const std::vector<int64_t> lengths = Draw("lognormal:0.5", 1000, 20000);
  EXPECT_NEAR(Mean(lengths), 1000, 20);  // its deviation is 533 / sqrt(20000) = 3.8
  EXPECT_GE(*std::min_element(lengths.begin(), lengths.end()), 1);
  EXPECT_EQ(*std::min_element(lengths.begin(), lengths.end()) < 400, true);
  for (const int64_t length : Draw("lognormal:4", 1, 200)) EXPECT_GE(length, 1);
}

TEST(Lengths, TheSeedDecides) {
  EXPECT_EQ(Draw("lognormal:1", 100, 50, 7), Draw("lognormal:1", 100, 50, 7));
  EXPECT_NE(Draw("lognormal:1", 100, 50, 7), Draw("lognormal:1", 100, 50, 8));
  std::mt19937_64 a(3), b(3);
  const std::vector<int32_t> ids = DrawIds(1000, 3, 10, a);
  EXPECT_EQ(ids, DrawIds(1000, 3, 10, b));
  EXPECT_EQ(*std::min_element(ids.begin(), ids.end()), 3);
  EXPECT_EQ(*std::max_element(ids.begin(), ids.end()), 9);
}

TEST(Lengths, BadDistributionsAreTold) {
  EXPECT_EQ(ParseLengthDistribution("normal:3").status().message(),
            "known: fixed, uniform:RANGE_RATIO, lognormal:SIGMA");
  for (const char* bad : {"uniform", "uniform:", "uniform:1.5", "uniform:x", "uniform:-1"}) {
    EXPECT_EQ(ParseLengthDistribution(bad).status().message(),
              "uniform takes a number from 0 to 1 behind a colon")
        << bad;
  }
  for (const char* bad : {"lognormal", "lognormal:0", "lognormal:5", "lognormal:nan"}) {
    EXPECT_FALSE(ParseLengthDistribution(bad).ok()) << bad;
  }
  EXPECT_FALSE(ParseLengthDistribution("fixed:3").ok());
  EXPECT_FALSE(ParseLengthDistribution("").ok());
}

TEST(Lengths, WhatDoesNotFitIsToldWithBothNumbers) {
  const std::vector<PromptLengths> lengths = {{10, 5}, {60, 41}};
  EXPECT_TRUE(CheckAllFit(lengths, 101).ok());
  EXPECT_EQ(CheckAllFit(lengths, 100).message(),
            "prompt 1: 60 tokens of the prompt and 41 of the answer are 101, more than the maximum "
            "length of 100");
}

std::vector<double> Arrivals(int64_t count, double rate, double burstiness, uint64_t seed = 1) {
  std::mt19937_64 random(seed);
  return DrawArrivals(count, rate, burstiness, random);
}

// The deviation of the intervals, in means.
double Spread(const std::vector<double>& arrivals, double rate) {
  double squares = 0, last = 0;
  for (const double arrival : arrivals) {
    squares += (arrival - last - 1 / rate) * (arrival - last - 1 / rate);
    last = arrival;
  }
  return std::sqrt(squares / static_cast<double>(arrivals.size())) * rate;
}

TEST(Arrivals, AnInfiniteRateIsAllAtOnce) {
  EXPECT_EQ(Arrivals(3, std::numeric_limits<double>::infinity(), 1),
            (std::vector<double>{0, 0, 0}));
}

TEST(Arrivals, MeetTheRateInOrder) {
  for (const double burstiness : {0.01, 0.5, 1.0, 4.0, 1e6}) {
    const std::vector<double> arrivals = Arrivals(1000, 20, burstiness);
    EXPECT_TRUE(std::is_sorted(arrivals.begin(), arrivals.end()));
    EXPECT_GE(arrivals.front(), 0);
    EXPECT_NEAR(arrivals.back(), 50, 1e-9) << burstiness;
  }
}

TEST(Arrivals, BurstinessIsTheShape) {
  // The deviation of a gamma distribution is its mean / sqrt(shape).
  EXPECT_NEAR(Spread(Arrivals(20000, 5, 1), 5), 1, 0.05);
  EXPECT_NEAR(Spread(Arrivals(20000, 5, 4), 5), 0.5, 0.05);
  EXPECT_NEAR(Spread(Arrivals(20000, 5, 0.25), 5), 2, 0.2);
  EXPECT_EQ(Arrivals(10, 5, 1, 3), Arrivals(10, 5, 1, 3));
  EXPECT_NE(Arrivals(10, 5, 1, 3), Arrivals(10, 5, 1, 4));
}

}  // namespace
}  // namespace lockstep
