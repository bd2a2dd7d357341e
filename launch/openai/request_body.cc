#include "launch/openai/request_body.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace lockstep {

namespace {

constexpr char kWhat[] = "the request body";

// Counts without parsing: values are one more than commas, in each list or object.
absl::Status CheckCounts(std::string_view text, const std::string& what) {
  std::vector<int64_t> commas(kMaxJsonDepth + 1);  // of the open lists and objects
  std::vector<bool> is_object(kMaxJsonDepth + 1);
  size_t depth = 0;
  int64_t values = 1;
  bool in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string) {
      if (c == '\\') ++i;
      if (c == '"') in_string = false;
      continue;
    }
    if (c == '"') {
      in_string = true;
    } else if (c == '[' || c == '{') {
      if (depth == kMaxJsonDepth) break;  // the parser says so
      ++depth;
      commas[depth] = 0;
      is_object[depth] = c == '{';
      ++values;
    } else if (c == ']' || c == '}') {
      if (depth > 0) --depth;
    } else if (c == ',') {
      ++values;
      if (++commas[depth] >= kMaxJsonKeys && is_object[depth]) {
        return absl::InvalidArgumentError(
            absl::StrFormat("%s: an object has more than %d keys (at byte %d)", what, kMaxJsonKeys,
                            static_cast<int64_t>(i)));
      }
    }
    if (values > kMaxJsonValues) {
      return absl::InvalidArgumentError(
          absl::StrFormat("%s holds more than %d values", what, kMaxJsonValues));
    }
  }
  return absl::OkStatus();
}

template <typename AnyJson>
absl::StatusOr<AnyJson> RequireObject(AnyJson json, const std::string& what) {
  if (json.is_object()) return json;
  return absl::InvalidArgumentError(
      absl::StrFormat("%s is %s: a JSON object is needed", what,
                      json.is_array() ? "a list" : std::string("a ") + json.type_name()));
}

}  // namespace

absl::StatusOr<Json> ParseBody(std::string_view body) {
  if (body.empty()) {
    return absl::InvalidArgumentError("the request body is empty: a JSON object is needed");
  }
  LOCKSTEP_RETURN_IF_ERROR(CheckCounts(body, kWhat));
  LOCKSTEP_ASSIGN_OR_RETURN(Json json, ParseJson(body, kWhat));
  return RequireObject(std::move(json), kWhat);
}

absl::StatusOr<OrderedJson> ParseOrderedObject(std::string_view text, const std::string& what) {
  LOCKSTEP_RETURN_IF_ERROR(CheckCounts(text, what));
  LOCKSTEP_ASSIGN_OR_RETURN(OrderedJson json, ParseOrderedJson(text, what));
  return RequireObject(std::move(json), what);
}

absl::StatusOr<OrderedJson> ParseOrderedBody(std::string_view body) {
  return ParseOrderedJson(body, kWhat);
}

absl::Status WithoutWhere(const absl::Status& status) {
  const std::string prefix = std::string(kRequestWhere) + ": ";
  std::string message(status.message());
  if (message.compare(0, prefix.size(), prefix) == 0) message.erase(0, prefix.size());
  return absl::Status(status.code(), message);
}

}  // namespace lockstep
