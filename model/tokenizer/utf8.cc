#include "model/tokenizer/utf8.h"

#include <cstdint>
#include <cstring>

namespace lockstep {

namespace {

enum class Sequence { kValid, kInvalid, kIncomplete };

// Classifies what stands at the start of non-empty `text`; `*length` is the size of the character,
// or of its longest prefix that could still begin one (at least 1).
Sequence Classify(std::string_view text, size_t* length) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char lead = byte(0);
  *length = 1;
  if (lead < 0x80) return Sequence::kValid;
  if (lead < 0xC2 || lead > 0xF4) return Sequence::kInvalid;
  const size_t size = lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
  // The second byte's range excludes overlong forms, surrogates and values above U+10FFFF.
  unsigned char low = 0x80, high = 0xBF;
  if (lead == 0xE0) low = 0xA0;
  if (lead == 0xED) high = 0x9F;
  if (lead == 0xF0) low = 0x90;
  if (lead == 0xF4) high = 0x8F;
  for (size_t i = 1; i < size; ++i) {
    if (i == text.size()) return Sequence::kIncomplete;
    if (byte(i) < low || byte(i) > high) return Sequence::kInvalid;
    low = 0x80;
    high = 0xBF;
    *length = i + 1;
  }
  return Sequence::kValid;
}

size_t AsciiPrefix(std::string_view text) {
  size_t i = 0;
  for (; i + 8 <= text.size(); i += 8) {
    uint64_t word;
    std::memcpy(&word, text.data() + i, 8);
    if (word & 0x8080808080808080u) break;
  }
  while (i < text.size() && static_cast<unsigned char>(text[i]) < 0x80) ++i;
  return i;
}

}  // namespace

size_t FindInvalidUtf8(std::string_view text) {
  size_t i = 0;
  while (i < text.size()) {
    i += AsciiPrefix(text.substr(i));
    if (i == text.size()) break;
    size_t length;
    if (Classify(text.substr(i), &length) != Sequence::kValid) return i;
    i += length;
  }
  return std::string_view::npos;
}

char32_t FirstCharacter(std::string_view text, int* length) {
  const auto byte = [&](size_t i) {
    return static_cast<char32_t>(static_cast<unsigned char>(text[i]));
  };
  *length = CharacterLength(text[0]);
  switch (*length) {
    case 1:
      return byte(0);
    case 2:
      return (byte(0) & 0x1F) << 6 | (byte(1) & 0x3F);
    case 3:
      return (byte(0) & 0x0F) << 12 | (byte(1) & 0x3F) << 6 | (byte(2) & 0x3F);
    default:
      return (byte(0) & 0x07) << 18 | (byte(1) & 0x3F) << 12 | (byte(2) & 0x3F) << 6 |
             (byte(3) & 0x3F);
  }
}

void AppendUtf8(char32_t c, std::string* out) {
  if (c < 0x80) {
    out->push_back(static_cast<char>(c));
  } else if (c < 0x800) {
    out->push_back(static_cast<char>(0xC0 | c >> 6));
    out->push_back(static_cast<char>(0x80 | (c & 0x3F)));
  } else if (c < 0x10000) {
    out->push_back(static_cast<char>(0xE0 | c >> 12));
    out->push_back(static_cast<char>(0x80 | (c >> 6 & 0x3F)));
    out->push_back(static_cast<char>(0x80 | (c & 0x3F)));
  } else {
    out->push_back(static_cast<char>(0xF0 | c >> 18));
    out->push_back(static_cast<char>(0x80 | (c >> 12 & 0x3F)));
    out->push_back(static_cast<char>(0x80 | (c >> 6 & 0x3F)));
    out->push_back(static_cast<char>(0x80 | (c & 0x3F)));
  }
}

size_t AppendLossyUtf8(std::string_view bytes, bool final, std::string* out) {
  size_t i = 0;
  while (i < bytes.size()) {
    size_t length;
    const Sequence kind = Classify(bytes.substr(i), &length);
    if (kind == Sequence::kIncomplete && !final) break;
    if (kind == Sequence::kValid) {
      out->append(bytes.substr(i, length));
    } else {
      out->append(kReplacementCharacter);
    }
    i += length;
  }
  return i;
}

bool IsWhitespace(char32_t c) {
  return (c >= 0x09 && c <= 0x0D) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
         c == 0x3000;
}

std::string_view StripLeft(std::string_view text) {
  while (!text.empty()) {
    int length;
    if (!IsWhitespace(FirstCharacter(text, &length))) break;
    text.remove_prefix(length);
  }
  return text;
}

std::string_view StripRight(std::string_view text) {
  while (!text.empty()) {
    size_t last = text.size() - 1;
    while ((text[last] & 0xC0) == 0x80) --last;
    int length;
    if (!IsWhitespace(FirstCharacter(text.substr(last), &length))) break;
    text.remove_suffix(length);
  }
  return text;
}

}  // namespace lockstep
