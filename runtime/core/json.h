// JSON without exceptions and with a depth limit (nlohmann's DOM is copied and destroyed
// recursively: two million brackets would overflow the stack).
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "runtime/core/status.h"

namespace lockstep {

using Json = nlohmann::json;  // object keys sorted; lookups O(log n)
using OrderedJson =
    nlohmann::ordered_json;  // object keys in file order; lookups O(n): never for a vocabulary

inline constexpr int kMaxJsonDepth = 256;

// Parses one whole UTF-8 JSON text. InvalidArgument, naming `what` (a path, "line 3 of stdin") and
// the byte offset, if it is no JSON, nests deeper than kMaxJsonDepth, or holds invalid UTF-8.
absl::StatusOr<Json> ParseJson(std::string_view text, const std::string& what);
absl::StatusOr<OrderedJson> ParseOrderedJson(std::string_view text, const std::string& what);

// One line of UTF-8 text; invalid bytes become U+FFFD instead of an exception.
std::string DumpJson(const Json& json);
std::string DumpJson(const OrderedJson& json);

}  // namespace lockstep
