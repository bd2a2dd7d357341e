#include "model/checkpoint/shorten.h"

#include "absl/strings/str_format.h"

namespace lockstep {

std::string Shortened(std::string_view text) {
  if (text.size() <= kMaxShownBytes) return std::string(text);
  size_t end = kMaxShownBytes;
  while (end > kMaxShownBytes - 3 && (static_cast<uint8_t>(text[end]) & 0xC0) == 0x80) --end;
  return absl::StrFormat("%s... (%d bytes)", text.substr(0, end), text.size());
}

}  // namespace lockstep
