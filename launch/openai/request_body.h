// A request's body as JSON, within bounds: what a client sends may cost time and memory only in
// proportion to its size.
#pragma once

#include <string>
#include <string_view>

#include "runtime/core/json.h"
#include "runtime/core/status.h"

namespace lockstep {

// Values (numbers, strings, lists, ...) in one body. A token id is one; each costs some 16 to 130
// bytes of memory while the body is read.
inline constexpr int64_t kMaxJsonValues = 2'000'000;
// Keys of one object: OrderedJson looks them up one by one.
inline constexpr int64_t kMaxJsonKeys = 1024;

// A JSON object. InvalidArgument says what is wrong and where: no JSON, not UTF-8, nested too deep,
// too many values or keys, no object.
absl::StatusOr<Json> ParseBody(std::string_view body);
// One JSON object of another kind within the same bounds, keys in their order; `what` leads the
// message.
absl::StatusOr<OrderedJson> ParseOrderedObject(std::string_view text, const std::string& what);
// The same body again with its keys in the client's order, which chat templates print. Only after
// ParseBody.
absl::StatusOr<OrderedJson> ParseOrderedBody(std::string_view body);

// What JsonFields is to call the body, and its errors without that: the field's name leads.
inline constexpr char kRequestWhere[] = "request";
absl::Status WithoutWhere(const absl::Status& status);

}  // namespace lockstep
