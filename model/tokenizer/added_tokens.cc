#include "model/tokenizer/added_tokens.h"

#include <utf8proc.h>

#include <algorithm>

#include "model/tokenizer/utf8.h"

namespace lockstep {

namespace {

// \w of Unicode regular expressions (UTS 18): alphabetic, mark, decimal digit, connector
// punctuation, join control.
bool IsWordCharacter(char32_t c) {
  if (c == 0x200C || c == 0x200D) return true;
  if (c >= 0x24B6 && c <= 0x24E9)
    return true;  // circled letters: category So, but Other_Alphabetic
  switch (utf8proc_category(static_cast<utf8proc_int32_t>(c))) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_PC:
      return true;
    default:
      return false;
  }
}

bool StartsWithWord(std::string_view text) {
  int length;
  return !text.empty() && IsWordCharacter(FirstCharacter(text, &length));
}

bool EndsWithWord(std::string_view text) {
  if (text.empty()) return false;
  size_t last = text.size() - 1;
  while ((text[last] & 0xC0) == 0x80) --last;
  int length;
  return IsWordCharacter(FirstCharacter(text.substr(last), &length));
}

// End of the whitespace that begins at `at`. `*known` is the last answer: inside the same run it is
// not searched again, which would take quadratic time.
size_t WhitespaceEnd(std::string_view text, size_t at, size_t* known) {
  if (at > *known) *known = text.size() - StripLeft(text.substr(at)).size();
  return *known;
}

}  // namespace

int32_t AddedTokenMatcher::Child(int32_t node, unsigned char byte) const {
  for (const auto& [child_byte, child] : nodes_[node].children) {
    if (child_byte == byte) return child;
  }
  return -1;
}

void AddedTokenMatcher::Add(const AddedToken& token, std::string_view pattern) {
  if (pattern.empty()) return;
  int32_t node = 0;
  for (const char c : pattern) {
    const auto byte = static_cast<unsigned char>(c);
    int32_t child = node == 0 ? root_[byte] : Child(node, byte);
    if (child < 0) {
      child = static_cast<int32_t>(nodes_.size());
      nodes_.emplace_back();
      if (node == 0) {
        root_[byte] = child;
      } else {
        nodes_[node].children.emplace_back(byte, child);
      }
    }
    node = child;
  }
  if (nodes_[node].token >= 0) return;
  nodes_[node].token = static_cast<int32_t>(tokens_.size());
  tokens_.push_back(token);
}

int32_t AddedTokenMatcher::LongestAt(std::string_view text, size_t* length) const {
  int32_t best = -1;
  int32_t node = root_[static_cast<unsigned char>(text[0])];
  for (size_t i = 1; node >= 0; ++i) {
    if (nodes_[node].token >= 0) {
      best = nodes_[node].token;
      *length = i;
    }
    if (i == text.size()) break;
    node = Child(node, static_cast<unsigned char>(text[i]));
  }
  return best;
}

void AddedTokenMatcher::Split(std::string_view text, std::vector<Segment>* segments) const {
  segments->clear();
  size_t done = 0;  // everything before is in `segments`
  size_t stripped = 0;
  size_t at = 0;
  while (!tokens_.empty() && at < text.size()) {
    size_t length = 0;
    if (root_[static_cast<unsigned char>(text[at])] < 0) {
      ++at;
      continue;
    }
    const int32_t found = LongestAt(text.substr(at), &length);
    if (found < 0) {
      ++at;
      continue;
    }
    const AddedToken& token = tokens_[found];
    size_t begin = at;
    size_t end = at + length;
    at = end;
    if (token.single_word &&
        (EndsWithWord(text.substr(0, begin)) || StartsWithWord(text.substr(end)))) {
      continue;
    }
    if (token.lstrip) {
      begin = begin < done ? done : done + StripRight(text.substr(done, begin - done)).size();
    }
    if (token.rstrip) end = std::max(end, WhitespaceEnd(text, end, &stripped));
    if (begin >= end) continue;  // an earlier token's rstrip took all of it, and lstrip noticed
    if (begin > done) segments->push_back({text.substr(done, begin - done)});
    segments->push_back({text.substr(begin, end - begin), token.id});
    done = end;
  }
  if (done < text.size()) segments->push_back({text.substr(done)});
}

}  // namespace lockstep
