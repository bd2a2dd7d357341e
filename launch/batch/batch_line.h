// One line of a batch job's input.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "launch/openai/api_error.h"

namespace lockstep {

// What the command line says where a line says nothing.
struct LineDefaults {
  std::optional<int64_t> max_tokens = std::nullopt;
  std::optional<uint64_t> seed = std::nullopt;  // of line N: seed + 1024 * N
};

struct BatchLine {
  std::optional<std::string> custom_id;
  std::string path;         // of the request
  std::string body;         // of the request, JSON
  int64_t num_choices = 1;  // answers that it asks for, as far as they can be counted here
  // The line cannot become a request; only custom_id counts then.
  std::optional<ApiError> error;
};

// Either a line of OpenAI's batch files,
//   {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": ...}}
// with the url /v1/completions or /v1/chat/completions; or the body itself, a completion when it
// has a `prompt`, a chat when it has `messages`, and where it likes a `custom_id`. Whether the
// fields of a body make sense is left to the API (launch/openai), but for streams, which have no
// place in a file.
BatchLine ParseBatchLine(std::string_view text, int64_t number, const LineDefaults& defaults);

}  // namespace lockstep
