#include "model/chat/jinja_lexer.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdlib>

#include "absl/strings/str_format.h"
#include "model/chat/python_text.h"

namespace lockstep {
namespace {

using Type = JinjaTokenType;

// "\r\n" and "\r" become "\n", and one newline at the end of the template goes.
std::string NormalizeSource(std::string_view source) {
  std::string out;
  out.reserve(source.size());
  for (size_t i = 0; i < source.size(); ++i) {
    if (source[i] == '\r') {
      out += '\n';
      if (i + 1 < source.size() && source[i + 1] == '\n') ++i;
    } else {
      out += source[i];
    }
  }
  if (!out.empty() && out.back() == '\n') out.pop_back();
  return out;
}

bool IsDigit(char c) { return c >= '0' && c <= '9'; }
bool IsNameStart(char32_t c) { return c == '_' || IsPythonAlpha(c); }

class Lexer {
 public:
  explicit Lexer(std::string source) : source_(std::move(source)) {}
  std::vector<JinjaToken> Run();

 private:
  [[noreturn]] void Fail(std::string message) const {
    throw JinjaSyntaxError{absl::StatusCode::kInvalidArgument, line_, std::move(message)};
  }
  bool At(std::string_view what) const {
    return std::string_view(source_).substr(pos_, what.size()) == what;
  }
  char Peek(size_t ahead = 0) const {
    return pos_ + ahead < source_.size() ? source_[pos_ + ahead] : '\0';
  }
  JinjaToken& Emit(Type type, std::string text) {
    tokens_.push_back({.type = type, .text = std::move(text), .line = line_});
    return tokens_.back();
  }
  void Advance(size_t end) {
    line_ += static_cast<int>(std::count(source_.begin() + static_cast<ptrdiff_t>(pos_),
                                         source_.begin() + static_cast<ptrdiff_t>(end), '\n'));
    pos_ = end;
  }

  void LexText();
  void EmitText(size_t end, char sign, bool is_output);
  bool TryRaw();
  void LexComment();
  void LexTag(bool is_output);
  bool TryTagEnd(bool is_output);
  void SkipSpace();
  void AfterBlock(char sign, size_t end);
  void LexString(char quote);
  void LexEscape(std::string_view body, size_t* i, std::string* out) const;
  char32_t LexCodePoint(std::string_view body, size_t* i, size_t digits) const;
  void LexNumber();
  bool LexFloatEnd(size_t* end) const;
  size_t DigitsEnd(size_t p) const;
  void LexOperator();

  const std::string source_;
  size_t pos_ = 0;
  int line_ = 1;
  bool line_starting_ = true;  // whether the text that comes next starts a line
  std::string brackets_;       // open ones, within a tag
  std::vector<JinjaToken> tokens_;
};

std::vector<JinjaToken> Lexer::Run() {
  while (pos_ < source_.size()) LexText();
  Emit(Type::kEnd, "");
  return std::move(tokens_);
}

// One stretch of text and the tag behind it.
void Lexer::LexText() {
  size_t tag = pos_;
  while ((tag = source_.find('{', tag)) != std::string::npos) {
    const char kind = tag + 1 < source_.size() ? source_[tag + 1] : '\0';
    if (kind == '{' || kind == '%' || kind == '#') break;
    ++tag;
  }
  if (tag == std::string::npos) {
    Emit(Type::kText, source_.substr(pos_));
    Advance(source_.size());
    return;
  }
  const char kind = source_[tag + 1];
  const char sign = tag + 2 < source_.size() ? source_[tag + 2] : '\0';
  const bool signed_tag = sign == '-' || sign == '+';
  EmitText(tag, sign, kind == '{');
  Advance(tag + 2 + (signed_tag ? 1 : 0));
  line_starting_ = false;
  if (kind == '#') {
    LexComment();
  } else if (kind == '{') {
    Emit(Type::kOutputBegin, "{{");
    LexTag(/*is_output=*/true);
  } else if (!TryRaw()) {
    Emit(Type::kBlockBegin, "{%");
    LexTag(/*is_output=*/false);
  }
}

// The text before a tag: "{%-" takes all white space before it; a tag alone on its line takes the
// line's indentation.
void Lexer::EmitText(size_t end, char sign, bool is_output) {
  std::string_view text = std::string_view(source_).substr(pos_, end - pos_);
  if (sign == '-') {
    text = PythonStripRight(text, nullptr);
  } else if (sign != '+' && !is_output) {
    const size_t newline = text.rfind('\n');
    const size_t line_begin = newline == std::string_view::npos ? 0 : newline + 1;
    if ((line_begin > 0 || line_starting_) &&
        PythonStripLeft(text.substr(line_begin), nullptr).empty()) {
      text = text.substr(0, line_begin);
    }
  }
  if (!text.empty()) Emit(Type::kText, std::string(text));
}

// After "{%": `raw %}` up to the matching endraw. False, and nothing consumed, if this is another
// tag.
bool Lexer::TryRaw() {
  size_t p = pos_;
  const auto skip_space = [this](size_t q) {
    return source_.size() - PythonStripLeft(std::string_view(source_).substr(q), nullptr).size();
  };
  p = skip_space(p);
  if (source_.compare(p, 3, "raw") != 0) return false;
  p = skip_space(p + 3);
  const bool strip = source_.compare(p, 3, "-%}") == 0;
  if (!strip && source_.compare(p, 2, "%}") != 0) return false;
  Advance(strip ? skip_space(p + 3) : p + 2);
  for (size_t tag = source_.find("{%", pos_); tag != std::string::npos;
       tag = source_.find("{%", tag + 2)) {
    size_t q = tag + 2;
    const char sign = q < source_.size() ? source_[q] : '\0';
    q = skip_space(q + (sign == '-' || sign == '+' ? 1 : 0));
    if (source_.compare(q, 6, "endraw") != 0) continue;
    q = skip_space(q + 6);
    const char end_sign = q < source_.size() && source_[q] != '%' ? source_[q] : '\0';
    const size_t close = end_sign == '\0' ? q : q + 1;
    if (source_.compare(close, 2, "%}") != 0) continue;
    EmitText(tag, sign, /*is_output=*/false);
    AfterBlock(end_sign, close + 2);
    return true;
  }
  Fail("the tag 'raw' is not closed: 'endraw' expected");
}

// Behind "%}" or "#}": one newline goes, or all white space after "-%}", or nothing after "+%}".
void Lexer::AfterBlock(char sign, size_t end) {
  if (sign == '-') {
    end = source_.size() - PythonStripLeft(std::string_view(source_).substr(end), nullptr).size();
  } else if (sign != '+' && end < source_.size() && source_[end] == '\n') {
    ++end;
  }
  Advance(end);
  line_starting_ = source_[end - 1] == '\n';
}

void Lexer::LexComment() {
  const size_t end = source_.find("#}", pos_);
  if (end == std::string::npos) Fail("the comment is not closed: '#}' expected");
  const char sign = end > pos_ ? source_[end - 1] : '\0';
  AfterBlock(sign == '-' || sign == '+' ? sign : '\0', end + 2);
}

bool Lexer::TryTagEnd(bool is_output) {
  const std::string_view close = is_output ? "}}" : "%}";
  char sign = '\0';
  if (Peek() == '-' || (Peek() == '+' && !is_output)) sign = Peek();
  const size_t at = pos_ + (sign == '\0' ? 0 : 1);
  if (std::string_view(source_).substr(at, 2) != close) return false;
  Emit(is_output ? Type::kOutputEnd : Type::kBlockEnd, std::string(close));
  if (is_output && sign == '\0') {
    Advance(at + 2);
    line_starting_ = false;
  } else {
    AfterBlock(sign, at + 2);
  }
  return true;
}

void Lexer::SkipSpace() {
  const std::string_view rest = std::string_view(source_).substr(pos_);
  Advance(source_.size() - PythonStripLeft(rest, nullptr).size());
}

void Lexer::LexTag(bool is_output) {
  brackets_.clear();
  const int begin_line = line_;
  for (;;) {
    SkipSpace();
    if (pos_ >= source_.size()) {
      line_ = begin_line;
      Fail(absl::StrFormat("the tag that begins here is not closed: '%s' expected",
                           is_output ? "}}" : "%}"));
    }
    // Within brackets "}}" closes two of them.
    if (brackets_.empty() && TryTagEnd(is_output)) return;
    const char c = Peek();
    size_t next = pos_;
    if (c == '\'' || c == '"') {
      LexString(c);
    } else if (IsDigit(c)) {
      LexNumber();
    } else if (IsNameStart(NextCodePoint(source_, &next))) {
      size_t end = next;
      while (end < source_.size()) {
        size_t p = end;
        const char32_t d = NextCodePoint(source_, &p);
        if (d != '_' && !IsPythonAlnum(d)) break;
        end = p;
      }
      Emit(Type::kName, source_.substr(pos_, end - pos_));
      pos_ = end;
    } else {
      LexOperator();
    }
  }
}

void Lexer::LexOperator() {
  static constexpr std::array<std::string_view, 27> kOperators = {
      "//", "**", "==", "!=", ">=", "<=", "+", "-", "/", "*", "%", "~", "[", "]",
      "(",  ")",  "{",  "}",  ">",  "<",  "=", ".", ":", "|", ",", ";", ""};
  const auto* op = std::find_if(kOperators.begin(), kOperators.end(),
                                [this](std::string_view o) { return At(o); });
  if (op->empty()) {
    size_t next = pos_;
    NextCodePoint(source_, &next);
    Fail(absl::StrFormat("unexpected character %s",
                         PythonRepr(std::string_view(source_).substr(pos_, next - pos_))));
  }
  const char c = op->front();
  if (op->size() == 1 && (c == '(' || c == '[' || c == '{')) {
    brackets_ += c == '(' ? ')' : c == '[' ? ']' : '}';
  } else if (c == ')' || c == ']' || c == '}') {
    if (brackets_.empty()) Fail(absl::StrFormat("unexpected '%c'", c));
    if (brackets_.back() != c) {
      Fail(absl::StrFormat("unexpected '%c', expected '%c'", c, brackets_.back()));
    }
    brackets_.pop_back();
  }
  Emit(Type::kOperator, std::string(*op));
  pos_ += op->size();
}

// Digits with single underscores between them; p itself if there are none.
size_t Lexer::DigitsEnd(size_t p) const {
  while (p < source_.size() &&
         (IsDigit(source_[p]) ||
          (source_[p] == '_' && p + 1 < source_.size() && p > pos_ && IsDigit(source_[p + 1])))) {
    ++p;
  }
  return p;
}

// Whether a fraction or an exponent follows the digits that end at *end; moves *end behind it.
bool Lexer::LexFloatEnd(size_t* end) const {
  size_t p = *end;
  bool is_float = false;
  if (p + 1 < source_.size() && source_[p] == '.' && IsDigit(source_[p + 1])) {
    p = DigitsEnd(p + 1);
    is_float = true;
  }
  if (p < source_.size() && (source_[p] == 'e' || source_[p] == 'E')) {
    size_t q = p + 1;
    if (q < source_.size() && (source_[q] == '+' || source_[q] == '-')) ++q;
    if (q < source_.size() && IsDigit(source_[q])) {
      p = DigitsEnd(q);
      is_float = true;
    }
  }
  *end = p;
  return is_float;
}

void Lexer::LexNumber() {
  const bool after_dot = pos_ > 0 && source_[pos_ - 1] == '.';
  size_t end = DigitsEnd(pos_);
  std::string digits;
  int base = 10;
  const char kind = Peek() == '0' ? static_cast<char>(Peek(1) | 0x20) : '\0';
  if (kind == 'x' || kind == 'o' || kind == 'b') {
    base = kind == 'x' ? 16 : kind == 'o' ? 8 : 2;
    end = pos_ + 2;
    while (end < source_.size() &&
           (std::isxdigit(static_cast<unsigned char>(source_[end])) != 0 || source_[end] == '_')) {
      ++end;
    }
    digits = source_.substr(pos_ + 2, end - pos_ - 2);
  } else if (!after_dot && LexFloatEnd(&end)) {
    digits = source_.substr(pos_, end - pos_);
    digits.erase(std::remove(digits.begin(), digits.end(), '_'), digits.end());
    Emit(Type::kFloat, digits).float_value = std::strtod(digits.c_str(), nullptr);
    pos_ = end;
    return;
  } else {
    digits = source_.substr(pos_, end - pos_);
  }
  digits.erase(std::remove(digits.begin(), digits.end(), '_'), digits.end());
  JinjaInt value = 0;
  bool valid = !digits.empty();
  for (const char c : digits) {
    const int digit = IsDigit(c) ? c - '0' : (c | 0x20) - 'a' + 10;
    valid = valid && digit < base && !__builtin_mul_overflow(value, JinjaInt{base}, &value) &&
            !__builtin_add_overflow(value, JinjaInt{digit}, &value);
  }
  if (!valid) Fail(absl::StrFormat("bad integer %s", source_.substr(pos_, end - pos_)));
  Emit(Type::kInt, source_.substr(pos_, end - pos_)).int_value = value;
  pos_ = end;
}

void Lexer::LexString(char quote) {
  size_t end = pos_ + 1;
  while (end < source_.size() && source_[end] != quote) end += source_[end] == '\\' ? 2 : 1;
  if (end >= source_.size()) Fail("the string that begins here is not closed");
  const std::string_view body = std::string_view(source_).substr(pos_ + 1, end - pos_ - 1);
  std::string text;
  for (size_t i = 0; i < body.size();) {
    if (body[i] == '\\') {
      LexEscape(body, &i, &text);
    } else {
      text += body[i++];
    }
  }
  Emit(Type::kString, std::move(text));
  Advance(end + 1);
}

char32_t Lexer::LexCodePoint(std::string_view body, size_t* i, size_t digits) const {
  const std::string_view hex = body.substr(*i, digits);
  uint32_t value = 0;
  const auto [stop, error] = std::from_chars(hex.data(), hex.data() + hex.size(), value, 16);
  if (hex.size() != digits || error != std::errc() || stop != hex.data() + hex.size() ||
      value > 0x10FFFF || (value >= 0xD800 && value < 0xE000)) {
    Fail(absl::StrFormat("bad escape in a string: \\%c%s", body[*i - 1], hex));
  }
  *i += digits;
  return value;
}

// The escapes of a Python string; an unknown one stays as it is.
void Lexer::LexEscape(std::string_view body, size_t* i, std::string* out) const {
  static constexpr std::string_view kNames = "\\'\"abfnrtv";
  static constexpr std::string_view kValues = "\\'\"\a\b\f\n\r\t\v";
  ++*i;
  const char c = body[*i];
  if (const size_t known = kNames.find(c); known != std::string_view::npos) {
    *out += kValues[known];
    ++*i;
  } else if (c == '\n') {
    ++*i;  // a line continued
  } else if (c == 'x' || c == 'u' || c == 'U') {
    ++*i;
    AppendCodePoint(LexCodePoint(body, i, c == 'x' ? 2 : c == 'u' ? 4 : 8), out);
  } else if (c >= '0' && c <= '7') {
    uint32_t value = 0;
    for (int n = 0; n < 3 && *i < body.size() && body[*i] >= '0' && body[*i] <= '7'; ++n) {
      value = value * 8 + static_cast<uint32_t>(body[(*i)++] - '0');
    }
    AppendCodePoint(value, out);
  } else if (c == 'N') {
    Fail("characters by name (\\N{...}) are not supported");
  } else if ((c & 0x80) != 0) {
    // jinja2 resolves escapes on an ASCII form of the string, so a backslash before another
    // character shows that form.
    const char32_t code_point = NextCodePoint(body, i);
    *out += code_point < 0x100     ? absl::StrFormat("\\x%02x", static_cast<unsigned>(code_point))
            : code_point < 0x10000 ? absl::StrFormat("\\u%04x", static_cast<unsigned>(code_point))
                                   : absl::StrFormat("\\U%08x", static_cast<unsigned>(code_point));
  } else {
    *out += '\\';
    *out += c;
    ++*i;
  }
}

}  // namespace

std::vector<JinjaToken> TokenizeJinja(std::string_view source) {
  return Lexer(NormalizeSource(source)).Run();
}

std::string DescribeToken(const JinjaToken& token) {
  switch (token.type) {
    case Type::kText:
      return "text";
    case Type::kOutputBegin:
      return "'{{'";
    case Type::kOutputEnd:
      return "'}}'";
    case Type::kBlockBegin:
      return "'{%'";
    case Type::kBlockEnd:
      return "'%}'";
    case Type::kEnd:
      return "the end of the template";
    case Type::kString:
      return PythonRepr(token.text);
    default:
      return "'" + token.text + "'";
  }
}

}  // namespace lockstep
