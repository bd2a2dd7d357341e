#include "model/tokenizer/json_fields.h"

namespace lockstep {

namespace {

absl::Status WrongField(const std::string& where, const char* key, std::string_view wanted,
                        bool missing) {
  return absl::InvalidArgumentError(
      missing ? absl::StrFormat("%s: \"%s\" (%s) is missing", where, key, wanted)
              : absl::StrFormat("%s: \"%s\" must be %s", where, key, wanted));
}

}  // namespace

const Json* FindField(const Json& object, const char* key) {
  if (!object.is_object()) return nullptr;
  const auto it = object.find(key);
  return it == object.end() || it->is_null() ? nullptr : &*it;
}

absl::StatusOr<bool> BoolField(const Json& object, const char* key, std::optional<bool> fallback,
                               const std::string& where) {
  const Json* field = FindField(object, key);
  if (field == nullptr && fallback.has_value()) return *fallback;
  if (field == nullptr || !field->is_boolean())
    return WrongField(where, key, "true or false", field == nullptr);
  return field->get<bool>();
}

absl::StatusOr<int64_t> IntField(const Json& object, const char* key,
                                 std::optional<int64_t> fallback, const std::string& where) {
  const Json* field = FindField(object, key);
  if (field == nullptr && fallback.has_value()) return *fallback;
  if (field == nullptr || !field->is_number_integer())
    return WrongField(where, key, "an integer", field == nullptr);
  return field->get<int64_t>();
}

absl::StatusOr<std::string> StringField(const Json& object, const char* key,
                                        std::optional<std::string> fallback,
                                        const std::string& where) {
  const Json* field = FindField(object, key);
  if (field == nullptr && fallback.has_value()) return *fallback;
  if (field == nullptr || !field->is_string())
    return WrongField(where, key, "a string", field == nullptr);
  return field->get_ref<const std::string&>();
}

absl::StatusOr<const Json*> ArrayField(const Json& object, const char* key,
                                       const std::string& where) {
  const Json* field = FindField(object, key);
  if (field == nullptr || !field->is_array())
    return WrongField(where, key, "an array", field == nullptr);
  return field;
}

absl::StatusOr<std::shared_ptr<const Regex>> PatternField::Compile(const std::string& where) const {
  return is_regex ? Regex::Create(text, where) : Regex::CreateLiteral(text, where);
}

absl::StatusOr<PatternField> ParsePattern(const Json& object, const std::string& where) {
  const Json* pattern = FindField(object, "pattern");
  if (pattern != nullptr && pattern->is_object() && pattern->size() == 1) {
    const std::string& kind = pattern->begin().key();
    const Json& text = pattern->begin().value();
    if ((kind == "String" || kind == "Regex") && text.is_string()) {
      return PatternField{kind == "Regex", text.get_ref<const std::string&>()};
    }
  }
  return absl::InvalidArgumentError(
      absl::StrFormat("%s: \"pattern\" must be {\"String\": text} or {\"Regex\": text}", where));
}

absl::Status UnsupportedComponent(const std::string& where, std::string_view kind,
                                  std::string_view name) {
  return absl::InvalidArgumentError(
      absl::StrFormat("%s: %s \"%s\" is not supported", where, kind, name));
}

}  // namespace lockstep
