#include "launch/bench/length_distribution.h"

#include <algorithm>
#include <cmath>
#include <string_view>

#include "launch/option_values.h"

namespace lockstep {

namespace {

// Lengths are far below; keeps a draw inside int64_t.
constexpr double kLongest = 1e12;

absl::StatusOr<double> ParseSpread(const std::string& text, size_t colon, double min, double max) {
  const std::string value = colon == std::string::npos ? "" : text.substr(colon + 1);
  const absl::StatusOr<double> spread = ParseNumber(value);
  if (!spread.ok() || *spread < min || *spread > max) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s takes a number from %g to %g behind a colon", text.substr(0, colon), min, max));
  }
  return *spread;
}

}  // namespace

absl::StatusOr<LengthDistribution> ParseLengthDistribution(const std::string& text) {
  const size_t colon = text.find(':');
  const std::string name = text.substr(0, colon);
  LengthDistribution distribution;
  if (text == "fixed") return distribution;
  if (name == "uniform") {
    distribution.kind = LengthDistribution::Kind::kUniform;
    LOCKSTEP_ASSIGN_OR_RETURN(distribution.spread, ParseSpread(text, colon, 0, 1));
    return distribution;
  }
  if (name == "lognormal") {
    distribution.kind = LengthDistribution::Kind::kLognormal;
    LOCKSTEP_ASSIGN_OR_RETURN(distribution.spread, ParseSpread(text, colon, 0.001, 4));
    return distribution;
  }
  return absl::InvalidArgumentError("known: fixed, uniform:RANGE_RATIO, lognormal:SIGMA");
}

int64_t DrawLength(const LengthDistribution& distribution, int64_t length,
                   std::mt19937_64& random) {
  const auto mean = static_cast<double>(length);
  switch (distribution.kind) {
    case LengthDistribution::Kind::kFixed:
      return length;
    case LengthDistribution::Kind::kUniform: {
      const double low = std::floor(mean * (1 - distribution.spread));
      const double high = std::ceil(mean * (1 + distribution.spread));
      return std::uniform_int_distribution<int64_t>(std::max<int64_t>(1, std::llround(low)),
                                                    std::llround(high))(random);
    }
    case LengthDistribution::Kind::kLognormal: {
      // exp(m + s^2 / 2) is the mean of a lognormal distribution.
      const double s = distribution.spread;
      const double drawn =
          std::lognormal_distribution<double>(std::log(mean) - s * s / 2, s)(random);
      return std::max<int64_t>(1, std::llround(std::min(drawn, kLongest)));
    }
  }
  LOCKSTEP_CHECK(false);
}

std::vector<int32_t> DrawIds(int64_t length, int32_t begin, int32_t end, std::mt19937_64& random) {
  std::uniform_int_distribution<int32_t> id(begin, end - 1);
  std::vector<int32_t> ids(static_cast<size_t>(length));
  std::generate(ids.begin(), ids.end(), [&] { return id(random); });
  return ids;
}

}  // namespace lockstep
