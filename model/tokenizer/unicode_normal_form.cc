#include <utf8proc.h>

#include <algorithm>
#include <array>

#include "model/tokenizer/normalizer.h"
#include "model/tokenizer/utf8.h"

namespace lockstep {

namespace {

bool IsAscii(char c) { return static_cast<unsigned char>(c) < 0x80; }

int CombiningClass(utf8proc_int32_t c) { return utf8proc_get_property(c)->combining_class; }

// Appends the normal form of one stretch. utf8proc_map would sort combining marks by insertion,
// which is quadratic in a run's length; so characters are decomposed one by one and each run is
// sorted here.
void AppendNormalForm(std::string_view text, bool compose, bool compatibility,
                      std::vector<utf8proc_int32_t>* buffer, std::string* out) {
  const int stable = UTF8PROC_STABLE | (compatibility ? UTF8PROC_COMPAT : 0);
  buffer->clear();
  std::array<utf8proc_int32_t, 32>
      decomposed;  // the longest decomposition has 18 characters (U+FDFA)
  int boundary = 0;
  while (!text.empty()) {
    int length;
    const char32_t c = FirstCharacter(text, &length);
    text.remove_prefix(length);
    const utf8proc_ssize_t count = utf8proc_decompose_char(
        static_cast<utf8proc_int32_t>(c), decomposed.data(), decomposed.size(),
        static_cast<utf8proc_option_t>(stable | UTF8PROC_DECOMPOSE), &boundary);
    LOCKSTEP_CHECK(count >= 0 && count <= static_cast<utf8proc_ssize_t>(decomposed.size()));
    buffer->insert(buffer->end(), decomposed.begin(), decomposed.begin() + count);
  }
  for (size_t i = 0; i < buffer->size();) {
    size_t end = i;
    while (end < buffer->size() && CombiningClass((*buffer)[end]) != 0) ++end;
    if (end - i > 1) {
      std::stable_sort(buffer->begin() + i, buffer->begin() + end,
                       [](utf8proc_int32_t a, utf8proc_int32_t b) {
                         return CombiningClass(a) < CombiningClass(b);
                       });
    }
    i = end + 1;
  }
  utf8proc_ssize_t count = static_cast<utf8proc_ssize_t>(buffer->size());
  if (compose) {
    count = utf8proc_normalize_utf32(buffer->data(), count,
                                     static_cast<utf8proc_option_t>(stable | UTF8PROC_COMPOSE));
  }
  LOCKSTEP_CHECK(count >= 0);
  for (utf8proc_ssize_t i = 0; i < count; ++i) AppendUtf8(static_cast<char32_t>((*buffer)[i]), out);
}

}  // namespace

std::string UnicodeNormalForm(std::string_view text, bool compose, bool compatibility) {
  std::string out;
  out.reserve(text.size() + text.size() / 8);
  std::vector<utf8proc_int32_t> buffer;
  // ASCII characters are their own normal forms, and none composes with what stands before it. So a
  // stretch that may change begins at the last ASCII character before a non-ASCII one and ends
  // before the next ASCII character.
  size_t i = 0;
  while (i < text.size()) {
    size_t end = i;
    while (end < text.size() && IsAscii(text[end])) ++end;
    if (end < text.size() && end > i) --end;
    if (end > i) out.append(text.substr(i, end - i));
    i = end;
    if (i == text.size()) break;
    end = i + 1;
    while (end < text.size() && !IsAscii(text[end])) ++end;
    AppendNormalForm(text.substr(i, end - i), compose, compatibility, &buffer, &out);
    i = end;
  }
  return out;
}

}  // namespace lockstep
