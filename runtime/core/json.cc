#include "runtime/core/json.h"

namespace lockstep {

namespace {

// Offset of the first bracket deeper than the limit, or npos. Brackets inside strings do not count.
size_t FindTooDeep(std::string_view text) {
  int depth = 0;
  bool in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string) {
      if (c == '\\') {
        ++i;
      } else if (c == '"') {
        in_string = false;
      }
    } else if (c == '"') {
      in_string = true;
    } else if (c == '[' || c == '{') {
      if (++depth > kMaxJsonDepth) return i;
    } else if (c == ']' || c == '}') {
      --depth;
    }
  }
  return std::string_view::npos;
}

template <typename J>
absl::StatusOr<J> Parse(std::string_view text, const std::string& what) {
  if (const size_t at = FindTooDeep(text); at != std::string_view::npos) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s: JSON nests deeper than %d levels at byte %d", what, kMaxJsonDepth, at));
  }
  // The library takes a NUL for the end of the text, and would say nothing of what follows.
  if (const size_t at = text.find('\0'); at != std::string_view::npos) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s: not valid JSON: a NUL at byte %d", what, at));
  }
  try {
    return J::parse(text.begin(), text.end());
  } catch (const nlohmann::json::exception& e) {
    // The library's message starts with "[json.exception.parse_error.101] "; the reader needs only
    // what follows.
    std::string_view reason = e.what();
    if (const size_t end = reason.find("] "); end != std::string_view::npos) {
      reason.remove_prefix(end + 2);
    }
    return absl::InvalidArgumentError(absl::StrFormat("%s: not valid JSON: %s", what, reason));
  }
}

}  // namespace

absl::StatusOr<Json> ParseJson(std::string_view text, const std::string& what) {
  return Parse<Json>(text, what);
}
absl::StatusOr<OrderedJson> ParseOrderedJson(std::string_view text, const std::string& what) {
  return Parse<OrderedJson>(text, what);
}

std::string DumpJson(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}
std::string DumpJson(const OrderedJson& json) {
  return json.dump(-1, ' ', false, OrderedJson::error_handler_t::replace);
}

}  // namespace lockstep
