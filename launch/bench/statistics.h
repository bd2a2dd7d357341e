// Statistics of a sample of measured values.
//
// Percentiles are interpolated linearly between the two values next to rank (n - 1) * p / 100,
// counted from 0 in ascending order (Hyndman and Fan, 1996, type 7; what NumPy does by default): p0
// is the smallest value, p100 the largest. The standard deviation is that of the values themselves
// (divided by n, not by n - 1). Of an empty sample there is nothing: JSON says null, a table "-".
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "runtime/core/json.h"

namespace lockstep {

class Statistics {
 public:
  Statistics() = default;
  // Finite values, in any order.
  explicit Statistics(std::vector<double> values);

  int64_t count() const { return std::ssize(values_); }
  bool empty() const { return values_.empty(); }

  // Of a sample that is not empty.
  double mean() const { return mean_; }
  double std() const { return std_; }
  double min() const { return values_.front(); }
  double max() const { return values_.back(); }
  double median() const { return Percentile(50); }
  double Percentile(double p) const;  // p in [0, 100]

 private:
  std::vector<double> values_;  // ascending
  double mean_ = 0;
  double std_ = 0;
};

// count, mean, median, std, p90, p99, min, max.
OrderedJson StatisticsJson(const Statistics& statistics);

// A line of StatisticsTable.
struct StatisticsRow {
  std::string name;  // with its unit
  Statistics statistics;
};
// The same values, a line a sample, in columns; the names' column is wide enough for all.
std::string StatisticsTable(std::span<const StatisticsRow> rows);

// "99" and "99.9", as in p99 and p99.9.
std::string PercentileName(double p);

}  // namespace lockstep
