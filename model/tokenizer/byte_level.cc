#include "model/tokenizer/byte_level.h"

#include <array>

#include "model/tokenizer/utf8.h"

namespace lockstep {

namespace {

constexpr int kCharacters = 0x144;  // the mapping's characters are below U+0144

struct Mapping {
  std::array<std::string, 256> character;
  std::array<int16_t, kCharacters> byte;  // by character, -1: none

  Mapping() {
    byte.fill(-1);
    char32_t next = 0x100;
    for (int b = 0; b < 256; ++b) {
      const bool printable = (b >= 0x21 && b <= 0x7E) || (b >= 0xA1 && b != 0xAD);
      const char32_t c = printable ? static_cast<char32_t>(b) : next++;
      AppendUtf8(c, &character[b]);
      byte[c] = static_cast<int16_t>(b);
    }
  }
};

const Mapping& GetMapping() {
  static const Mapping& mapping = *new Mapping;
  return mapping;
}

}  // namespace

const std::string& ByteLevelCharacter(uint8_t byte) { return GetMapping().character[byte]; }

void AppendByteLevel(std::string_view bytes, std::string* out) {
  const Mapping& mapping = GetMapping();
  for (const char b : bytes) out->append(mapping.character[static_cast<uint8_t>(b)]);
}

void AppendByteLevelDecoded(std::string_view token, std::string* out) {
  const Mapping& mapping = GetMapping();
  const size_t size = out->size();
  for (std::string_view rest = token; !rest.empty();) {
    int length;
    const char32_t c = FirstCharacter(rest, &length);
    if (c >= kCharacters || mapping.byte[c] < 0) {
      out->resize(size);
      out->append(token);
      return;
    }
    out->push_back(static_cast<char>(mapping.byte[c]));
    rest.remove_prefix(length);
  }
}

}  // namespace lockstep
