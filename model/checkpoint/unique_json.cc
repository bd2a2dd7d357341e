#include "model/checkpoint/unique_json.h"

#include <set>
#include <vector>

namespace lockstep {

absl::StatusOr<Json> ParseUniqueJson(const std::string& text, const std::string& what) {
  // First the checks of depth and syntax: the second parse then cannot fail.
  LOCKSTEP_ASSIGN_OR_RETURN(Json parsed, ParseJson(text, what));
  std::vector<std::set<std::string>> open_objects;
  std::string duplicate;
  const auto watch = [&](int, Json::parse_event_t event, Json& value) {
    if (event == Json::parse_event_t::object_start) {
      open_objects.emplace_back();
    } else if (event == Json::parse_event_t::object_end) {
      open_objects.pop_back();
    } else if (event == Json::parse_event_t::key) {
      const std::string& key = value.get_ref<const std::string&>();
      if (!open_objects.back().insert(key).second && duplicate.empty()) duplicate = key;
    }
    return true;
  };
  const Json again = Json::parse(text, watch, /*allow_exceptions=*/false);
  if (!duplicate.empty()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s: the key %s is there twice", what, duplicate));
  }
  return parsed;
}

}  // namespace lockstep
