#include "model/checkpoint/unique_json.h"

#include <unordered_set>
#include <vector>

#include "model/checkpoint/shorten.h"

namespace lockstep {

namespace {

// Follows a parse and keeps the keys of the objects that are open, nothing else; stops at the
// first key that is there twice. (The library's parser with a callback searches the parent at the
// end of each object: quadratic in the number of tensors.)
class DuplicateKeyFinder : public nlohmann::json_sax<Json> {
 public:
  const std::string& duplicate() const { return duplicate_; }
  bool found() const { return found_; }

  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_unsigned(number_unsigned_t) override { return true; }
  bool number_float(number_float_t, const string_t&) override { return true; }
  bool string(string_t&) override { return true; }
  bool binary(binary_t&) override { return true; }
  bool start_object(size_t) override {
    open_objects_.emplace_back();
    return true;
  }
  bool key(string_t& key) override {
    if (open_objects_.back().insert(key).second) return true;
    duplicate_ = key;
    found_ = true;
    return false;
  }
  bool end_object() override {
    open_objects_.pop_back();
    return true;
  }
  bool start_array(size_t) override { return true; }
  bool end_array() override { return true; }
  bool parse_error(size_t, const std::string&, const nlohmann::detail::exception&) override {
    return false;
  }

 private:
  std::vector<std::unordered_set<std::string>> open_objects_;
  std::string duplicate_;
  bool found_ = false;
};

}  // namespace

absl::StatusOr<Json> ParseUniqueJson(const std::string& text, const std::string& what) {
  // First the checks of depth and syntax: the second pass then cannot fail.
  LOCKSTEP_ASSIGN_OR_RETURN(Json parsed, ParseJson(text, what));
  DuplicateKeyFinder finder;
  Json::sax_parse(text, &finder);
  if (finder.found()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s: the key %s is there twice", what, Shortened(finder.duplicate())));
  }
  return parsed;
}

}  // namespace lockstep
