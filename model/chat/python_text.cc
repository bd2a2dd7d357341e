#include "model/chat/python_text.h"

#include <algorithm>
#include <cstring>
#include <iterator>

#include "absl/strings/str_format.h"
#include "model/chat/special_casing.h"
#include "utf8proc.h"

namespace lockstep {
namespace {

constexpr char32_t kRawByte = 0xDC00;

bool IsAscii(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return (c & 0x80) == 0; });
}

int Category(char32_t c) { return static_cast<int>(utf8proc_category(static_cast<int32_t>(c))); }

bool IsCased(char32_t c) {
  return IsPythonLower(c) || IsPythonUpper(c) || Category(c) == UTF8PROC_CATEGORY_LT;
}

void AppendUpper(char32_t c, std::string* out) {
  if (const SpecialCase* s = FindSpecialCase(c)) {
    *out += s->upper;
  } else {
    AppendCodePoint(static_cast<char32_t>(utf8proc_toupper(static_cast<int32_t>(c))), out);
  }
}

void AppendTitle(char32_t c, std::string* out) {
  if (const SpecialCase* s = FindSpecialCase(c); s != nullptr && *s->title != '\0') {
    *out += s->title;
  } else {
    AppendCodePoint(static_cast<char32_t>(utf8proc_totitle(static_cast<int32_t>(c))), out);
  }
}

// Where the code point before `end` begins; an invalid sequence is taken byte by byte.
size_t PreviousCodePoint(std::string_view text, size_t end) {
  size_t begin = end - 1;
  while (begin > 0 && end - begin < 4 && (text[begin] & 0xC0) == 0x80) --begin;
  size_t next = begin;
  NextCodePoint(text, &next);
  return next == end ? begin : end - 1;
}

// A capital sigma at the end of a word becomes a final sigma (Unicode's Final_Sigma, looking one
// character each way).
bool IsFinalSigma(std::string_view text, size_t begin, size_t end) {
  if (begin == 0) return false;
  size_t p = PreviousCodePoint(text, begin);
  if (!IsCased(NextCodePoint(text, &p))) return false;
  return end >= text.size() || !IsCased(NextCodePoint(text, &end));
}

void AppendLower(std::string_view text, char32_t c, size_t begin, size_t end, std::string* out) {
  if (c == 0x130) {
    *out += "i\xcc\x87";
  } else if (c == 0x3A3) {
    AppendCodePoint(IsFinalSigma(text, begin, end) ? 0x3C2 : 0x3C3, out);
  } else {
    AppendCodePoint(static_cast<char32_t>(utf8proc_tolower(static_cast<int32_t>(c))), out);
  }
}

bool Contains(std::string_view chars, char32_t c) {
  for (size_t p = 0; p < chars.size();) {
    if (NextCodePoint(chars, &p) == c) return true;
  }
  return false;
}

bool Strippable(char32_t c, const std::string_view* chars) {
  return chars == nullptr ? IsPythonSpace(c) : Contains(*chars, c);
}

}  // namespace

char32_t NextCodePoint(std::string_view text, size_t* pos) {
  const auto byte = static_cast<unsigned char>(text[*pos]);
  if (byte < 0x80) {
    ++*pos;
    return byte;
  }
  int32_t code_point = 0;
  const auto* data = reinterpret_cast<const utf8proc_uint8_t*>(text.data() + *pos);
  const auto left = static_cast<utf8proc_ssize_t>(text.size() - *pos);
  const utf8proc_ssize_t n = utf8proc_iterate(data, left, &code_point);
  if (n <= 0) {
    ++*pos;
    return kRawByte + byte;
  }
  *pos += static_cast<size_t>(n);
  return static_cast<char32_t>(code_point);
}

void AppendCodePoint(char32_t c, std::string* out) {
  if (c >= kRawByte + 0x80 && c <= kRawByte + 0xFF) {
    out->push_back(static_cast<char>(c - kRawByte));
    return;
  }
  utf8proc_uint8_t buffer[4];
  const utf8proc_ssize_t n = utf8proc_encode_char(static_cast<int32_t>(c), buffer);
  out->append(reinterpret_cast<const char*>(buffer), static_cast<size_t>(n));
}

size_t CountCodePoints(std::string_view text) {
  if (IsAscii(text)) return text.size();
  size_t n = 0;
  for (size_t p = 0; p < text.size(); ++n) NextCodePoint(text, &p);
  return n;
}

size_t ByteOffset(std::string_view text, size_t index) {
  size_t p = 0;
  for (; index > 0 && p < text.size(); --index) NextCodePoint(text, &p);
  return p;
}

bool IsPythonSpace(char32_t c) {
  if (c < 0x80) return (c >= 0x9 && c <= 0xD) || (c >= 0x1C && c <= 0x20);
  return c == 0x85 || c == 0xA0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200A) || c == 0x2028 ||
         c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

bool IsPythonAlpha(char32_t c) {
  const int k = Category(c);
  return k >= UTF8PROC_CATEGORY_LU && k <= UTF8PROC_CATEGORY_LO;
}

bool IsPythonDigit(char32_t c) {
  // Digits that are no decimal digits: superscripts, circled and parenthesised ones, a few scripts.
  static constexpr char32_t kRanges[][2] = {
      {0xB2, 0xB3},       {0xB9, 0xB9},       {0x1369, 0x1371},   {0x19DA, 0x19DA},
      {0x2070, 0x2070},   {0x2074, 0x2079},   {0x2080, 0x2089},   {0x2460, 0x2468},
      {0x2474, 0x247C},   {0x2488, 0x2490},   {0x24EA, 0x24EA},   {0x24F5, 0x24FD},
      {0x24FF, 0x24FF},   {0x2776, 0x277E},   {0x2780, 0x2788},   {0x278A, 0x2792},
      {0x10A40, 0x10A43}, {0x10E60, 0x10E68}, {0x11052, 0x1105A}, {0x1F100, 0x1F10A}};
  if (Category(c) == UTF8PROC_CATEGORY_ND) return true;
  return std::any_of(std::begin(kRanges), std::end(kRanges),
                     [c](const char32_t(&r)[2]) { return c >= r[0] && c <= r[1]; });
}

bool IsPythonAlnum(char32_t c) {
  const int k = Category(c);
  return IsPythonAlpha(c) || (k >= UTF8PROC_CATEGORY_ND && k <= UTF8PROC_CATEGORY_NO);
}

bool IsPythonPrintable(char32_t c) {
  if (c == ' ') return true;
  switch (Category(c)) {
    case UTF8PROC_CATEGORY_CN:
    case UTF8PROC_CATEGORY_CC:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_CS:
    case UTF8PROC_CATEGORY_CO:
    case UTF8PROC_CATEGORY_ZS:
    case UTF8PROC_CATEGORY_ZL:
    case UTF8PROC_CATEGORY_ZP:
      return false;
    default:
      return true;
  }
}

bool IsPythonLower(char32_t c) { return utf8proc_islower(static_cast<int32_t>(c)) != 0; }
bool IsPythonUpper(char32_t c) { return utf8proc_isupper(static_cast<int32_t>(c)) != 0; }

std::string PythonUpper(std::string_view text) {
  std::string out;
  for (size_t p = 0; p < text.size();) AppendUpper(NextCodePoint(text, &p), &out);
  return out;
}

std::string PythonLower(std::string_view text) {
  std::string out;
  for (size_t p = 0; p < text.size();) {
    const size_t begin = p;
    const char32_t c = NextCodePoint(text, &p);
    AppendLower(text, c, begin, p, &out);
  }
  return out;
}

std::string PythonCapitalize(std::string_view text) {
  std::string out;
  for (size_t p = 0; p < text.size();) {
    const size_t begin = p;
    const char32_t c = NextCodePoint(text, &p);
    begin == 0 ? AppendTitle(c, &out) : AppendLower(text, c, begin, p, &out);
  }
  return out;
}

std::string PythonTitle(std::string_view text) {
  std::string out;
  bool after_cased = false;
  for (size_t p = 0; p < text.size();) {
    const size_t begin = p;
    const char32_t c = NextCodePoint(text, &p);
    after_cased ? AppendLower(text, c, begin, p, &out) : AppendTitle(c, &out);
    after_cased = IsCased(c);
  }
  return out;
}

std::string PythonSwapcase(std::string_view text) {
  std::string out;
  for (size_t p = 0; p < text.size();) {
    const size_t begin = p;
    const char32_t c = NextCodePoint(text, &p);
    IsPythonUpper(c) ? AppendLower(text, c, begin, p, &out) : AppendUpper(c, &out);
  }
  return out;
}

size_t FindFirst(std::string_view text, std::string_view part, size_t from) {
  if (from > text.size()) return std::string_view::npos;
  if (part.empty()) return from;
  if (part.size() > text.size() - from) return std::string_view::npos;  // nor memmem of null
  const void* at = memmem(text.data() + from, text.size() - from, part.data(), part.size());
  if (at == nullptr) return std::string_view::npos;
  return static_cast<size_t>(static_cast<const char*>(at) - text.data());
}

size_t FindLast(std::string_view text, std::string_view part) {
  const std::string reversed_text(text.rbegin(), text.rend());
  const std::string reversed_part(part.rbegin(), part.rend());
  const size_t at = FindFirst(reversed_text, reversed_part);
  return at == std::string_view::npos ? at : text.size() - part.size() - at;
}

std::string PythonRepr(std::string_view text) {
  const bool single = text.find('\'') == std::string_view::npos;
  const char quote = single || text.find('"') != std::string_view::npos ? '\'' : '"';
  std::string out(1, quote);
  for (size_t p = 0; p < text.size();) {
    const char32_t c = NextCodePoint(text, &p);
    if (c == static_cast<char32_t>(quote) || c == '\\') {
      out += '\\';
      out += static_cast<char>(c);
    } else if (c == '\n') {
      out += "\\n";
    } else if (c == '\r') {
      out += "\\r";
    } else if (c == '\t') {
      out += "\\t";
    } else if (IsPythonPrintable(c)) {
      AppendCodePoint(c, &out);
    } else if (c < 0x100) {
      out += absl::StrFormat("\\x%02x", static_cast<unsigned>(c));
    } else if (c < 0x10000) {
      out += absl::StrFormat("\\u%04x", static_cast<unsigned>(c));
    } else {
      out += absl::StrFormat("\\U%08x", static_cast<unsigned>(c));
    }
  }
  out += quote;
  return out;
}

std::string_view PythonStripLeft(std::string_view text, const std::string_view* chars) {
  size_t p = 0;
  while (p < text.size()) {
    size_t next = p;
    if (!Strippable(NextCodePoint(text, &next), chars)) break;
    p = next;
  }
  return text.substr(p);
}

std::string_view PythonStripRight(std::string_view text, const std::string_view* chars) {
  while (!text.empty()) {
    const size_t begin = PreviousCodePoint(text, text.size());
    size_t next = begin;
    const char32_t c = NextCodePoint(text, &next);
    if (!Strippable(c, chars)) break;
    text = text.substr(0, begin);
  }
  return text;
}

std::string EscapeHtml(std::string_view text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '\'':
        out += "&#39;";
        break;
      case '"':
        out += "&#34;";
        break;
      default:
        out += c;
    }
  }
  return out;
}

}  // namespace lockstep
