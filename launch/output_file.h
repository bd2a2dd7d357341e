// Files that an option names as an output.
#pragma once

#include <string>
#include <vector>

#include "runtime/core/status.h"

namespace lockstep {

// An output takes the place of a file of that name. InvalidArgument, with `option` in front, when
// that file is one of `model` (a file, or lies in that folder) or one of `inputs`, which are read;
// be it through links.
absl::Status CheckOutputIsNoInput(const std::string& option, const std::string& output,
                                  const std::string& model, const std::vector<std::string>& inputs);

}  // namespace lockstep
