#pragma once

#include <string>
#include <string_view>

namespace lockstep {

inline constexpr size_t kMaxShownBytes = 200;

// A name or value from a file as a message shows it: whole, or its first kMaxShownBytes bytes (no
// UTF-8 sequence cut through) and how long it is.
std::string Shortened(std::string_view text);

}  // namespace lockstep
