// Values of command-line options: text to number, with what is wrong said exactly. The option's
// name is added by the caller.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "runtime/core/status.h"

namespace lockstep {

inline constexpr int64_t kNoLimit = INT64_MAX;

// A decimal integer in [min, max].
absl::StatusOr<int64_t> ParseInt(std::string_view text, int64_t min, int64_t max = kNoLimit);
// A decimal integer in [0, 2^64).
absl::StatusOr<uint64_t> ParseUint64(std::string_view text);
// A finite decimal number.
absl::StatusOr<double> ParseNumber(std::string_view text);
// Bytes: an integer >= 1, optionally followed by K, M, G or T (powers of 1024).
absl::StatusOr<int64_t> ParseByteSize(std::string_view text);
// Token ids "1,2,3": not empty, each in [0, 2^31). The message gives the position of a bad entry.
absl::StatusOr<std::vector<int32_t>> ParseIdList(std::string_view text);

}  // namespace lockstep
