#pragma once

#include <string>

#include "runtime/core/status.h"

namespace lockstep {

// The whole file. NotFound when it is not there; FailedPrecondition when it cannot be read or is
// larger than `max_bytes`. The message names the path.
absl::StatusOr<std::string> ReadFile(const std::string& path, int64_t max_bytes = int64_t{1} << 30);

}  // namespace lockstep
