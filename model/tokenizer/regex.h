// Regular expressions of tokenizer files. They are written for Oniguruma; here PCRE2 runs them.
// What the two read differently is translated, or refused by name.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "runtime/core/status.h"

namespace lockstep {

// Byte range of a match.
struct Match {
  size_t begin;
  size_t end;
};

// A compiled pattern. Immutable; thread-safe.
class Regex {
 public:
  // InvalidArgument, naming `where` and the pattern, when it does not compile or uses something
  // that is not supported.
  static absl::StatusOr<std::shared_ptr<const Regex>> Create(std::string_view pattern,
                                                             const std::string& where);
  // Matches exactly `text`, which may not be empty.
  static absl::StatusOr<std::shared_ptr<const Regex>> CreateLiteral(std::string_view text,
                                                                    const std::string& where);
  ~Regex();
  Regex(const Regex&) = delete;
  Regex& operator=(const Regex&) = delete;

 private:
  struct Code;

 public:
  // Walks over the matches in `text` (valid UTF-8) from left to right, none overlapping; an empty
  // match directly after another match does not count. Text and regex must outlive it.
  class Finder {
   public:
    Finder(const Regex& regex, std::string_view text) : code_(*regex.code_), text_(text) {}
    // False at the end. ResourceExhausted when the text exceeds the pattern's limits.
    absl::StatusOr<bool> Next(Match* match);

   private:
    const Code& code_;
    std::string_view text_;
    size_t at_ = 0;
    size_t last_end_ = std::string_view::npos;
  };

 private:
  explicit Regex(std::unique_ptr<Code> code);
  std::unique_ptr<Code> code_;
};

// The PCRE2 spelling of an Oniguruma pattern. For tests; Regex::Create applies it.
absl::StatusOr<std::string> TranslateOniguruma(std::string_view pattern);

}  // namespace lockstep
