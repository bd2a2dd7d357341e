// Reading the sections of a tokenizer.json: each getter names the place and the key in its error.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "model/tokenizer/regex.h"
#include "runtime/core/json.h"
#include "runtime/core/status.h"

namespace lockstep {

// The value of `key`, or null when `object` is no object, lacks it, or has null there.
const Json* FindField(const Json& object, const char* key);

// A missing key gives `fallback`; without one it is an error, as is another type.
absl::StatusOr<bool> BoolField(const Json& object, const char* key, std::optional<bool> fallback,
                               const std::string& where);
absl::StatusOr<int64_t> IntField(const Json& object, const char* key,
                                 std::optional<int64_t> fallback, const std::string& where);
absl::StatusOr<std::string> StringField(const Json& object, const char* key,
                                        std::optional<std::string> fallback,
                                        const std::string& where);
absl::StatusOr<const Json*> ArrayField(const Json& object, const char* key,
                                       const std::string& where);

// `"pattern": {"String": "..."}` or `{"Regex": "..."}` of a Split or Replace section.
struct PatternField {
  bool is_regex = false;
  std::string text;

  absl::StatusOr<std::shared_ptr<const Regex>> Compile(const std::string& where) const;
};
absl::StatusOr<PatternField> ParsePattern(const Json& object, const std::string& where);

// "PATH: KIND "NAME" is not supported".
absl::Status UnsupportedComponent(const std::string& where, std::string_view kind,
                                  std::string_view name);

}  // namespace lockstep
