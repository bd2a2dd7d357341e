// Files of prompts: JSON lines.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "launch/sampling_defaults.h"
#include "runtime/core/json.h"

namespace lockstep {

// Exactly one of text, ids and messages is there.
struct PromptLine {
  std::optional<std::string> text;
  std::optional<std::vector<int32_t>> ids;
  std::optional<OrderedJson> messages;  // a list, for the chat template
  SamplingFlags sampling;
  int32_t priority = 0;
  std::string cache_salt;
};

// One line, UTF-8. InvalidArgument, `where` in front, for what is no such object; an unknown key is
// named. Ranges of sampling parameters are not checked.
absl::StatusOr<PromptLine> ParsePromptLine(const std::string& line, const std::string& where);

// Calls `each` for every line of the file ("-": stdin) that is not blank, in order, with "FILE line
// N"; its first error ends the reading. A byte order mark and CRLF are tolerated. NotFound or
// FailedPrecondition, naming the file, when it cannot be read; InvalidArgument when it holds no
// prompt.
absl::Status ReadPromptLines(
    const std::string& path,
    const std::function<absl::Status(PromptLine line, const std::string& where)>& each);

}  // namespace lockstep
