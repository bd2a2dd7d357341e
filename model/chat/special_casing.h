#pragma once

namespace lockstep {

// One-to-many case mappings, UTF-8: the unconditional entries of Unicode 14's SpecialCasing.txt. An
// empty `title` means that the title-case form is one character.
struct SpecialCase {
  char32_t code_point;
  const char* upper;
  const char* title;
};

// nullptr for a character whose upper-case form is one character.
const SpecialCase* FindSpecialCase(char32_t code_point);

}  // namespace lockstep
