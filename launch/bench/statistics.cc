#include "launch/bench/statistics.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

namespace lockstep {

Statistics::Statistics(std::vector<double> values) : values_(std::move(values)) {
  if (values_.empty()) return;
  std::sort(values_.begin(), values_.end());
  const double n = static_cast<double>(values_.size());
  mean_ = std::accumulate(values_.begin(), values_.end(), 0.0) / n;
  // Rounding must not push the mean of equal values beside them.
  mean_ = std::clamp(mean_, values_.front(), values_.back());
  double squares = 0;
  for (const double value : values_) squares += (value - mean_) * (value - mean_);
  std_ = std::sqrt(squares / n);
}

double Statistics::Percentile(double p) const {
  LOCKSTEP_CHECK(!values_.empty() && p >= 0 && p <= 100);
  const double rank = static_cast<double>(values_.size() - 1) * p / 100;
  const auto below = static_cast<size_t>(rank);
  if (below + 1 >= values_.size()) return values_.back();
  const double share = rank - static_cast<double>(below);
  return values_[below] + share * (values_[below + 1] - values_[below]);
}

OrderedJson StatisticsJson(const Statistics& statistics) {
  const auto value = [&statistics](auto of) {
    return statistics.empty() ? OrderedJson(nullptr) : OrderedJson(of(statistics));
  };
  OrderedJson json;
  json["count"] = statistics.count();
  json["mean"] = value([](const Statistics& s) { return s.mean(); });
  json["median"] = value([](const Statistics& s) { return s.median(); });
  json["std"] = value([](const Statistics& s) { return s.std(); });
  json["p90"] = value([](const Statistics& s) { return s.Percentile(90); });
  json["p99"] = value([](const Statistics& s) { return s.Percentile(99); });
  json["min"] = value([](const Statistics& s) { return s.min(); });
  json["max"] = value([](const Statistics& s) { return s.max(); });
  return json;
}

std::string StatisticsTable(std::span<const StatisticsRow> rows) {
  size_t width = 0;
  for (const StatisticsRow& row : rows) width = std::max(width, row.name.size());
  std::string text(width, ' ');
  absl::StrAppend(&text, absl::StrFormat("%8s", "count"));
  for (const char* column : {"mean", "median", "std", "p90", "p99", "min", "max"}) {
    absl::StrAppend(&text, absl::StrFormat("%11s", column));
  }
  absl::StrAppend(&text, "\n");
  for (const StatisticsRow& row : rows) {
    absl::StrAppend(&text, row.name, std::string(width - row.name.size(), ' '));
    const Statistics& s = row.statistics;
    absl::StrAppend(&text, absl::StrFormat("%8d", s.count()));
    if (s.empty()) {
      for (int column = 0; column < 7; ++column)
        absl::StrAppend(&text, absl::StrFormat("%11s", "-"));
    } else {
      for (const double value :
           {s.mean(), s.median(), s.std(), s.Percentile(90), s.Percentile(99), s.min(), s.max()}) {
        absl::StrAppend(&text, absl::StrFormat("%11.*f", value < 1e5 ? 3 : 1, value));
      }
    }
    absl::StrAppend(&text, "\n");
  }
  return text;
}

std::string PercentileName(double p) { return absl::StrFormat("%.10g", p); }

}  // namespace lockstep
