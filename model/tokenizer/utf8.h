// UTF-8 at the level of bytes.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace lockstep {

inline constexpr std::string_view kReplacementCharacter = "\xEF\xBF\xBD";  // U+FFFD

// Offset of the first byte that is not part of a valid character, or npos. Surrogates, overlong
// forms and values above U+10FFFF are invalid.
size_t FindInvalidUtf8(std::string_view text);

// The character at the start of valid, non-empty UTF-8; `*length` is its size in bytes.
char32_t FirstCharacter(std::string_view text, int* length);

// Bytes in the character that starts with `lead`, a valid lead byte.
inline int CharacterLength(char lead) {
  const unsigned char c = static_cast<unsigned char>(lead);
  return c < 0x80 ? 1 : c < 0xE0 ? 2 : c < 0xF0 ? 3 : 4;
}

void AppendUtf8(char32_t character, std::string* out);

// Appends `bytes` to `out`, each maximal invalid part as one U+FFFD (The Unicode Standard,
// section 3.9, table 3-8), and returns how many bytes were used: all when `final`, else all but a
// last character that later bytes may complete.
size_t AppendLossyUtf8(std::string_view bytes, bool final, std::string* out);

// White_Space of the Unicode Character Database.
bool IsWhitespace(char32_t character);

// `text` without the whitespace at its ends.
std::string_view StripLeft(std::string_view text);
std::string_view StripRight(std::string_view text);

}  // namespace lockstep
