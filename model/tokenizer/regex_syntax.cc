// Oniguruma's syntax (its manual, doc/RE) in PCRE2's terms (pcre2pattern(3)).

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <cctype>
#include <cstring>

#include "model/tokenizer/regex.h"

namespace lockstep {

namespace {

// Members of a character class. PCRE2's own \s also takes U+180E, and its \w takes neither marks
// nor connector punctuation.
constexpr const char* kSpace = "\\t-\\r\\x{85}\\p{Z}";
constexpr const char* kWordInClass = "\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}";
// Outside a class Oniguruma asks its table of Latin-1, where superscript digits and fractions are
// word characters too.
constexpr const char* kWord = "\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}\\xb2\\xb3\\xb9\\xbc-\\xbe";
constexpr const char* kHexDigit = "0-9a-fA-F";

// True when `name` is a script's. PCRE2 reads \p{Han} as "used with Han" (Script_Extensions),
// Oniguruma as the script itself.
bool IsScript(std::string_view name) {
  const std::string pattern = absl::StrFormat("\\p{sc:%s}", name);
  int error;
  size_t offset;
  pcre2_code* code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(),
                                   PCRE2_UTF, &error, &offset, nullptr);
  pcre2_code_free(code);
  return code != nullptr;
}

class Translator {
 public:
  explicit Translator(std::string_view pattern) : in_(pattern) {}

  absl::StatusOr<std::string> Run() {
    while (at_ < in_.size()) {
      LOCKSTEP_RETURN_IF_ERROR(in_class_ ? InClass() : Outside());
    }
    return std::move(out_);
  }

 private:
  char Peek(size_t ahead) const { return at_ + ahead < in_.size() ? in_[at_ + ahead] : '\0'; }
  void Copy(size_t count) {
    out_.append(in_.substr(at_, count));
    at_ += count;
  }
  void Put(const std::string& text, size_t consumed) {
    out_ += text;
    at_ += consumed;
  }
  absl::Status Refuse(std::string_view what) const {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s at byte %d of the pattern is not supported", what, at_));
  }

  absl::Status Outside() {
    switch (in_[at_]) {
      case '\\':
        return Escape();
      case '[':
        in_class_ = true;
        Copy(Peek(1) == '^' ? 2 : 1);
        if (Peek(0) == ']') Copy(1);  // a literal
        return absl::OkStatus();
      case '(':
        return Group();
      case '{':
        return Interval();
      default:
        Copy(1);
        return absl::OkStatus();
    }
  }

  absl::Status InClass() {
    const char c = in_[at_];
    if (c == '\\') return Escape();
    if (c == '&' && Peek(1) == '&') return Refuse("the class intersection &&");
    if (c == '[') {
      if (Peek(1) != ':') return Refuse("a class inside a class");
      for (const auto& [name, members] :
           {std::pair<std::string_view, const char*>{"[:alpha:]", "\\p{Alphabetic}"},
            {"[:digit:]", "\\p{Nd}"},
            {"[:space:]", kSpace}}) {
        if (in_.substr(at_, name.size()) != name) continue;
        Put(members, name.size());
        return absl::OkStatus();
      }
      return Refuse("a [:name:] other than alpha, digit and space");
    }
    if (c == ']') in_class_ = false;
    Copy(1);
    return absl::OkStatus();
  }

  // (?flags) and (?flags:...): m means "dot takes newlines" in Oniguruma and something else in
  // PCRE2.
  absl::Status Group() {
    if (Peek(1) == '*') return Refuse("(*");
    if (Peek(1) == '?' && (std::isalpha(static_cast<unsigned char>(Peek(2))) || Peek(2) == '-')) {
      for (size_t i = 2; Peek(i) != ':' && Peek(i) != ')'; ++i) {
        if (Peek(i) != 'i' && Peek(i) != 'x' && Peek(i) != '-')
          return Refuse("a group option other than i and x");
      }
    }
    Copy(1);
    return absl::OkStatus();
  }

  // In Oniguruma's syntax {n,m}+ repeats the interval and {n}? makes it optional; in PCRE2 they are
  // possessive and lazy.
  absl::Status Interval() {
    size_t end = at_ + 1;
    while (end < in_.size() &&
           (std::isdigit(static_cast<unsigned char>(in_[end])) || in_[end] == ','))
      ++end;
    if (end < in_.size() && in_[end] == '}' && end > at_ + 1) {
      const char next = end + 1 < in_.size() ? in_[end + 1] : '\0';
      const bool fixed = in_.substr(at_, end - at_).find(',') == std::string_view::npos;
      if (in_[at_ + 1] == ',') return Refuse("{,n}");
      if (next == '+' || (next == '?' && fixed)) return Refuse("a quantifier after {n}");
      Copy(end + 1 - at_);
    } else {
      Copy(1);
    }
    return absl::OkStatus();
  }

  // \p{Name}, \p{^Name} and \P{Name}.
  absl::Status Property() {
    const size_t end = in_.find('}', at_);
    if (Peek(2) != '{' || end == std::string_view::npos) return Refuse("\\p without {name}");
    const size_t begin = at_ + (Peek(3) == '^' ? 4 : 3);
    const std::string_view name = in_.substr(begin, end - begin);
    Copy(begin - at_);
    if (name.size() > 2 && IsScript(name)) out_ += "sc:";
    Copy(name.size() + 1);
    return absl::OkStatus();
  }

  absl::Status Escape() {
    const char c = Peek(1);
    const auto members = [&](const char* set, bool negated) {
      if (in_class_) return std::string(set);
      return absl::StrCat(negated ? "[^" : "[", set, "]");
    };
    switch (c) {
      case '\0':
        return Refuse("a lone \\");
      case 's':
        Put(members(kSpace, false), 2);
        return absl::OkStatus();
      case 'w':
        Put(members(in_class_ ? kWordInClass : kWord, false), 2);
        return absl::OkStatus();
      case 'h':
        Put(members(kHexDigit, false), 2);
        return absl::OkStatus();
      case 'S':
        if (in_class_) break;  // PCRE2's \S; it differs in U+180E alone
        Put(members(kSpace, true), 2);
        return absl::OkStatus();
      case 'W':
      case 'H':
        if (in_class_) return Refuse("a negated \\w or \\h in a class");
        Put(members(c == 'W' ? kWord : kHexDigit, true), 2);
        return absl::OkStatus();
      case 'b':
      case 'B':
        if (in_class_) break;
        Put(c == 'b' ? absl::StrFormat("(?:(?<=[%1$s])(?![%1$s])|(?<![%1$s])(?=[%1$s]))", kWord)
                     : absl::StrFormat("(?:(?<=[%1$s])(?=[%1$s])|(?<![%1$s])(?![%1$s]))", kWord),
            2);
        return absl::OkStatus();
      case 'p':
      case 'P':
        return Property();
      case 'u':
        if (at_ + 6 > in_.size()) return Refuse("an unfinished \\u");
        Put(absl::StrFormat("\\x{%s}", in_.substr(at_ + 2, 4)), 6);
        return absl::OkStatus();
      default:
        if (std::strchr("CEGKLNOQRUVXlyYXgk", c) != nullptr)
          return Refuse(absl::StrFormat("\\%c", c));
    }
    Copy(2);
    return absl::OkStatus();
  }

  std::string_view in_;
  size_t at_ = 0;
  bool in_class_ = false;
  std::string out_;
};

}  // namespace

absl::StatusOr<std::string> TranslateOniguruma(std::string_view pattern) {
  return Translator(pattern).Run();
}

}  // namespace lockstep
