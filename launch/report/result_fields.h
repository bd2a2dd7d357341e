// Fields of a JSON value that somebody else wrote: the first that is missing, or of another kind,
// is remembered as an error that names the file, and stands for 0 or "" until then.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "runtime/core/json.h"
#include "runtime/core/status.h"

namespace lockstep {

class ResultFields {
 public:
  // `json` must outlive this. `where` names it in errors.
  ResultFields(const OrderedJson& json, std::string where)
      : json_(json), where_(std::move(where)) {}

  // `path` is a name, or names joined by "/".
  double Number(std::string_view path);  // finite, 0 or more
  int64_t Integer(std::string_view path, int64_t min, int64_t max = int64_t{1} << 53);
  std::string Text(std::string_view path);
  std::optional<double> NumberOrNull(std::string_view path);
  // An empty array stands for one that is missing.
  const OrderedJson& Array(std::string_view path);

  absl::Status status() const { return status_; }

 private:
  const OrderedJson* Find(std::string_view path) const;
  void Fail(std::string_view path, std::string_view wanted);

  const OrderedJson& json_;
  std::string where_;
  absl::Status status_;
};

}  // namespace lockstep
