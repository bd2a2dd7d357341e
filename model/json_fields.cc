#include "model/json_fields.h"

#include <cmath>

namespace lockstep {

namespace {

// A value as a message quotes it: short and ASCII, whatever the file holds.
std::string Quote(const Json& value) {
  std::string text = value.dump(-1, ' ', /*ensure_ascii=*/true, Json::error_handler_t::replace);
  if (text.size() > 60) text = text.substr(0, 57) + "...";
  return text;
}

}  // namespace

JsonFields::JsonFields(const Json& object, std::string where)
    : object_(object), where_(std::move(where)) {
  if (!object_.is_object()) Fail("expected a JSON object, found " + Quote(object_));
}

void JsonFields::Fail(const std::string& message) {
  if (status_.ok()) status_ = absl::InvalidArgumentError(where_ + ": " + message);
}

void JsonFields::Adopt(const absl::Status& status) {
  if (status_.ok()) status_ = status;
}

const Json* JsonFields::Find(const char* key) const {
  if (!object_.is_object()) return nullptr;
  const auto it = object_.find(key);
  return it == object_.end() || it->is_null() ? nullptr : &*it;
}

bool JsonFields::HasNull(const char* key) const {
  if (!object_.is_object()) return false;
  const auto it = object_.find(key);
  return it != object_.end() && it->is_null();
}

std::optional<int64_t> JsonFields::ToInt(const Json& value, const std::string& key, int64_t min,
                                         int64_t max) {
  if (!value.is_number()) {
    Fail(absl::StrFormat("%s must be an integer, found %s", key, Quote(value)));
    return std::nullopt;
  }
  // As a double first: exact up to 2^53, beyond any bound used here, and safe for 1e300.
  const double number = value.get<double>();
  if (number != std::floor(number)) {
    Fail(absl::StrFormat("%s must be an integer, found %s", key, Quote(value)));
    return std::nullopt;
  }
  if (!(number >= static_cast<double>(min) && number <= static_cast<double>(max))) {
    Fail(absl::StrFormat("%s is %s, must be from %d to %d", key, Quote(value), min, max));
    return std::nullopt;
  }
  return static_cast<int64_t>(number);
}

std::optional<int64_t> JsonFields::Int(const char* key, int64_t min, int64_t max) {
  const Json* value = Find(key);
  return value == nullptr ? std::nullopt : ToInt(*value, key, min, max);
}

std::optional<double> JsonFields::Double(const char* key, double min, double max) {
  const Json* value = Find(key);
  if (value == nullptr) return std::nullopt;
  if (!value->is_number()) {
    Fail(absl::StrFormat("%s must be a number, found %s", key, Quote(*value)));
    return std::nullopt;
  }
  const double number = value->get<double>();
  if (!(number >= min && number <= max)) {
    if (max == std::numeric_limits<double>::max()) {
      Fail(absl::StrFormat("%s is %s, must be at least %g", key, Quote(*value), min));
    } else {
      Fail(absl::StrFormat("%s is %s, must be from %g to %g", key, Quote(*value), min, max));
    }
    return std::nullopt;
  }
  return number;
}

std::optional<bool> JsonFields::Bool(const char* key) {
  const Json* value = Find(key);
  if (value == nullptr) return std::nullopt;
  if (!value->is_boolean()) {
    Fail(absl::StrFormat("%s must be true or false, found %s", key, Quote(*value)));
    return std::nullopt;
  }
  return value->get<bool>();
}

std::optional<std::string> JsonFields::String(const char* key) {
  const Json* value = Find(key);
  if (value == nullptr) return std::nullopt;
  if (!value->is_string()) {
    Fail(absl::StrFormat("%s must be a string, found %s", key, Quote(*value)));
    return std::nullopt;
  }
  return value->get<std::string>();
}

std::vector<std::string> JsonFields::Strings(const char* key) {
  const Json* value = Find(key);
  std::vector<std::string> strings;
  if (value == nullptr) return strings;
  bool good = value->is_array();
  if (good) {
    for (const Json& item : *value) {
      good = good && item.is_string();
      if (good) strings.push_back(item.get<std::string>());
    }
  }
  if (!good) Fail(absl::StrFormat("%s must be a list of strings, found %s", key, Quote(*value)));
  return strings;
}

std::vector<int32_t> JsonFields::TokenIds(const char* key) {
  const Json* value = Find(key);
  std::vector<int32_t> ids;
  if (value == nullptr) return ids;
  const auto add = [&](const Json& item) {
    if (const auto id = ToInt(item, key, 0, std::numeric_limits<int32_t>::max())) {
      ids.push_back(static_cast<int32_t>(*id));
    }
  };
  if (value->is_array()) {
    for (const Json& item : *value) add(item);
  } else {
    add(*value);
  }
  return ids;
}

const Json* JsonFields::Object(const char* key) {
  const Json* value = Find(key);
  if (value != nullptr && !value->is_object()) {
    Fail(absl::StrFormat("%s must be an object, found %s", key, Quote(*value)));
    return nullptr;
  }
  return value;
}

int64_t JsonFields::RequiredInt(const char* key, int64_t min, int64_t max) {
  if (!Has(key)) Fail(absl::StrFormat("%s is missing", key));
  return Int(key, min, max).value_or(min);
}

double JsonFields::RequiredDouble(const char* key, double min, double max) {
  if (!Has(key)) Fail(absl::StrFormat("%s is missing", key));
  return Double(key, min, max).value_or(min);
}

}  // namespace lockstep
