// The normalizer section of a tokenizer.json.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "model/tokenizer/regex.h"
#include "runtime/core/json.h"
#include "runtime/core/status.h"

namespace lockstep {

// Sequence, NFC, NFD, NFKC, NFKD, Lowercase, Prepend, Replace, Strip, StripAccents. Immutable;
// thread-safe.
class Normalizer {
 public:
  // `json` may be null: then nothing is changed.
  static absl::StatusOr<Normalizer> Create(const Json& json, const std::string& where);

  bool empty() const { return steps_.empty(); }
  // Replaces `text` (valid UTF-8) by its normal form. Sets `*start_removed` when Strip took
  // something from its start.
  absl::Status Apply(std::string* text, bool* start_removed) const;

 private:
  enum class Kind {
    kUnicode,
    kLowercase,
    kPrepend,
    kReplaceString,
    kReplaceRegex,
    kStrip,
    kStripAccents
  };
  struct Step {
    Kind kind;
    bool compose = false, compatibility = false;  // kUnicode
    bool left = false, right = false;             // kStrip
    std::string pattern{};                        // kReplaceString
    std::shared_ptr<const Regex> regex{};         // kReplaceRegex
    std::string content{};                        // kPrepend, kReplace*
  };

  absl::Status Append(const Json& json, const std::string& where);
  static absl::Status ApplyStep(const Step& step, std::string* text, bool* start_removed);

  std::vector<Step> steps_;
};

// The Unicode normal form NFC, NFD (compose false), NFKC or NFKD (compatibility) of valid UTF-8, in
// time that grows linearly (n log n for runs of combining marks). Unicode 14 (utf8proc's tables).
std::string UnicodeNormalForm(std::string_view text, bool compose, bool compatibility);

}  // namespace lockstep
