// Typed, range-checked access to the keys of one JSON object, for configuration files.
#pragma once

#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "runtime/core/json.h"
#include "runtime/core/status.h"

namespace lockstep {

// Keeps the first fault it meets and goes on with defaults, so a reader of many keys checks
// status() once, at its end. A key that is null counts as absent. Not thread-safe; `object` must
// outlive it.
class JsonFields {
 public:
  // `where` (a path, "config.json: rope_scaling") leads every message.
  JsonFields(const Json& object, std::string where);

  bool Has(const char* key) const { return Find(key) != nullptr; }  // present and not null
  bool HasNull(const char* key) const;                              // present and null

  // The value, or nothing when the key is absent. Integers may be spelled 4096.0.
  std::optional<int64_t> Int(const char* key, int64_t min, int64_t max);
  std::optional<double> Double(const char* key, double min,
                               double max = std::numeric_limits<double>::max());
  std::optional<bool> Bool(const char* key);
  std::optional<std::string> String(const char* key);
  std::vector<std::string> Strings(const char* key);
  // A token id, or a list of them; absent gives an empty list.
  std::vector<int32_t> TokenIds(const char* key);
  // nullptr when the key is absent.
  const Json* Object(const char* key);

  int64_t RequiredInt(const char* key, int64_t min, int64_t max);
  double RequiredDouble(const char* key, double min,
                        double max = std::numeric_limits<double>::max());

  // Records a fault of the caller's own, "WHERE: MESSAGE".
  void Fail(const std::string& message);
  // Takes over a fault met elsewhere, as it is.
  void Adopt(const absl::Status& status);
  const absl::Status& status() const { return status_; }
  const std::string& where() const { return where_; }

 private:
  const Json* Find(const char* key) const;
  std::optional<int64_t> ToInt(const Json& value, const std::string& key, int64_t min, int64_t max);

  const Json& object_;
  std::string where_;
  absl::Status status_;
};

}  // namespace lockstep
