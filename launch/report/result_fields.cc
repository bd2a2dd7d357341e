#include "launch/report/result_fields.h"

#include <cmath>

namespace lockstep {

const OrderedJson* ResultFields::Find(std::string_view path) const {
  const OrderedJson* at = &json_;
  while (true) {
    const size_t slash = path.find('/');
    if (!at->is_object()) return nullptr;
    const auto found = at->find(std::string(path.substr(0, slash)));
    if (found == at->end()) return nullptr;
    at = &*found;
    if (slash == std::string_view::npos) return at;
    path.remove_prefix(slash + 1);
  }
}

void ResultFields::Fail(std::string_view path, std::string_view wanted) {
  if (!status_.ok()) return;
  status_ = absl::InvalidArgumentError(
      absl::StrFormat("%s: \"%s\" must be there and be %s", where_, path, wanted));
}

double ResultFields::Number(std::string_view path) {
  const OrderedJson* const value = Find(path);
  if (value != nullptr && value->is_number()) {
    const double number = value->get<double>();
    if (std::isfinite(number) && number >= 0) return number;
  }
  Fail(path, "a number, 0 or more");
  return 0;
}

std::optional<double> ResultFields::NumberOrNull(std::string_view path) {
  const OrderedJson* const value = Find(path);
  if (value == nullptr || value->is_null()) return std::nullopt;
  return Number(path);
}

int64_t ResultFields::Integer(std::string_view path, int64_t min, int64_t max) {
  const OrderedJson* const value = Find(path);
  if (value != nullptr && value->is_number_integer()) {
    const int64_t number = value->get<int64_t>();
    if (number >= min && number <= max) return number;
  }
  Fail(path, absl::StrFormat("a whole number from %d to %d", min, max));
  return min;
}

std::string ResultFields::Text(std::string_view path) {
  const OrderedJson* const value = Find(path);
  if (value != nullptr && value->is_string()) return value->get<std::string>();
  Fail(path, "a string");
  return "";
}

const OrderedJson& ResultFields::Array(std::string_view path) {
  static const OrderedJson kEmpty = OrderedJson::array();
  const OrderedJson* const value = Find(path);
  if (value != nullptr && value->is_array()) return *value;
  Fail(path, "an array");
  return kEmpty;
}

}  // namespace lockstep
