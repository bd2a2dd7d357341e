#pragma once

#include <string>

#include "runtime/core/json.h"

namespace lockstep {

// ParseJson that also refuses an object with the same key twice: of two spans for one tensor,
// neither is to be believed.
absl::StatusOr<Json> ParseUniqueJson(const std::string& text, const std::string& what);

}  // namespace lockstep
