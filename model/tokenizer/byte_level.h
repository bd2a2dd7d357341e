// GPT-2's mapping of bytes to printable characters, in which byte-level vocabularies are written: a
// space is U+0120 (Ġ). Source: GPT-2's release (Radford et al., 2019).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace lockstep {

// The UTF-8 spelling of the character that stands for `byte`.
const std::string& ByteLevelCharacter(uint8_t byte);

// Appends the characters for `bytes`.
void AppendByteLevel(std::string_view bytes, std::string* out);

// Appends the bytes that `token` stands for; a token with a character outside the mapping stands
// for its own UTF-8.
void AppendByteLevelDecoded(std::string_view token, std::string* out);

}  // namespace lockstep
