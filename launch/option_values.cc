#include "launch/option_values.h"

#include <charconv>
#include <cmath>
#include <string>

namespace lockstep {

namespace {

// Parses all of `text`; std::from_chars takes no locale, no leading space and no '+'.
template <typename T>
std::errc ParseWhole(std::string_view text, T* value) {
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, *value);
  if (error != std::errc()) return error;
  return stop == end ? std::errc() : std::errc::invalid_argument;
}

std::string Limits(int64_t min, int64_t max) {
  return max == kNoLimit ? absl::StrFormat("%d or more", min)
                         : absl::StrFormat("between %d and %d", min, max);
}

}  // namespace

absl::StatusOr<int64_t> ParseInt(std::string_view text, int64_t min, int64_t max) {
  int64_t value = 0;
  const std::errc error = ParseWhole(text, &value);
  if (error == std::errc::invalid_argument) {
    return absl::InvalidArgumentError(
        absl::StrFormat("not an integer; it must be %s", Limits(min, max)));
  }
  if (error != std::errc() || value < min || value > max) {
    return absl::InvalidArgumentError(absl::StrFormat("it must be %s", Limits(min, max)));
  }
  return value;
}

absl::StatusOr<uint64_t> ParseUint64(std::string_view text) {
  uint64_t value = 0;
  if (ParseWhole(text, &value) != std::errc()) {
    return absl::InvalidArgumentError("it must be an integer between 0 and 2^64 - 1");
  }
  return value;
}

absl::StatusOr<double> ParseNumber(std::string_view text) {
  double value = 0;
  const std::errc error = ParseWhole(text, &value);
  if (error == std::errc::invalid_argument) return absl::InvalidArgumentError("not a number");
  if (error != std::errc() || !std::isfinite(value)) {
    return absl::InvalidArgumentError("not a finite number");
  }
  return value;
}

absl::StatusOr<int64_t> ParseByteSize(std::string_view text) {
  int shift = 0;
  if (!text.empty()) {
    constexpr std::string_view kUnits = "KMGT";
    const size_t unit = kUnits.find(text.back() & ~0x20);  // k, m, g, t as well
    if (unit != std::string_view::npos) {
      shift = 10 * static_cast<int>(unit + 1);
      text.remove_suffix(1);
    }
  }
  int64_t value = 0;
  if (ParseWhole(text, &value) != std::errc() || value < 1 || value > (INT64_MAX >> shift)) {
    return absl::InvalidArgumentError(
        "it must be a positive number of bytes, such as 536870912, 512M or 8G");
  }
  return value << shift;
}

absl::StatusOr<std::vector<int32_t>> ParseIdList(std::string_view text) {
  std::vector<int32_t> ids;
  size_t begin = 0;
  while (true) {
    const size_t comma = std::min(text.find(',', begin), text.size());
    std::string_view entry = text.substr(begin, comma - begin);
    while (!entry.empty() && entry.front() == ' ') entry.remove_prefix(1);
    while (!entry.empty() && entry.back() == ' ') entry.remove_suffix(1);
    int32_t id = 0;
    if (ParseWhole(entry, &id) != std::errc() || id < 0) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "entry %d is '%s'; token ids are integers of 0 or more, separated by commas: 1,2,3",
          ids.size() + 1, entry));
    }
    ids.push_back(id);
    if (comma == text.size()) return ids;
    begin = comma + 1;
  }
}

}  // namespace lockstep
