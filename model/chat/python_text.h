// Python's str over UTF-8: what chat templates rely on (lengths, slices, case and white space by
// code point).
//
// Text is well-formed UTF-8 or nearly: a byte that starts no valid sequence counts as one character
// of its own (0xDC80 + low bits, as Python's surrogateescape) and is written back as that byte.
// Case and categories: utf8proc, Unicode 14, the version of Python 3.11; one-to-many case mappings:
// the unconditional ones of Unicode's SpecialCasing.txt. Pure functions.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace lockstep {

char32_t NextCodePoint(std::string_view text, size_t* pos);
void AppendCodePoint(char32_t code_point, std::string* out);
size_t CountCodePoints(std::string_view text);
// Byte offset of the code point with index `index`; text.size() if there are not that many.
size_t ByteOffset(std::string_view text, size_t index);

bool IsPythonSpace(char32_t c);
bool IsPythonAlpha(char32_t c);
bool IsPythonDigit(char32_t c);
bool IsPythonAlnum(char32_t c);
bool IsPythonPrintable(char32_t c);
bool IsPythonLower(char32_t c);
bool IsPythonUpper(char32_t c);

std::string PythonUpper(std::string_view text);
std::string PythonLower(std::string_view text);
std::string PythonCapitalize(std::string_view text);
std::string PythonTitle(std::string_view text);
std::string PythonSwapcase(std::string_view text);

// As find and rfind of string_view, but in time linear in `text` however alike it and `part` are.
// FindLast copies both.
size_t FindFirst(std::string_view text, std::string_view part, size_t from = 0);
size_t FindLast(std::string_view text, std::string_view part);

// repr(str): quotes chosen and characters escaped as Python does.
std::string PythonRepr(std::string_view text);

// The text without leading (trailing) characters of `chars`, or white space when `chars` is null.
std::string_view PythonStripLeft(std::string_view text, const std::string_view* chars);
std::string_view PythonStripRight(std::string_view text, const std::string_view* chars);

// &, <, >, ' and " as HTML entities, spelled as markupsafe does.
std::string EscapeHtml(std::string_view text);

}  // namespace lockstep
