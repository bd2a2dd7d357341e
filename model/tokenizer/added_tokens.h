// The added_tokens section of a tokenizer.json: tokens that are found in the text before the model
// sees it.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

struct AddedToken {
  int32_t id = 0;
  std::string content;
  bool special = false;
  bool normalized = false;   // is looked for in the normalised text, by its normalised content
  bool lstrip = false;       // takes the whitespace before it along
  bool rstrip = false;       // and after it
  bool single_word = false;  // only where no word character touches it
};

// A part of a text: an added token (id >= 0), or text between (id -1, never empty).
struct Segment {
  std::string_view text;
  int32_t id = -1;
};

// Finds the leftmost and, of those, longest tokens: a trie of bytes. Immutable; thread-safe.
class AddedTokenMatcher {
 public:
  // Adds `token`, to be found as `pattern`; an empty pattern is never found. Of two equal patterns
  // the first one counts.
  void Add(const AddedToken& token, std::string_view pattern);

  bool empty() const { return tokens_.empty(); }
  // Replaces `segments` by the parts of `text`, from left to right.
  void Split(std::string_view text, std::vector<Segment>* segments) const;

 private:
  struct Node {
    int32_t token = -1;  // index in tokens_ of the pattern that ends here
    std::vector<std::pair<unsigned char, int32_t>> children;
  };
  int32_t Child(int32_t node, unsigned char byte) const;
  // Index in tokens_ of the longest pattern at the start of `text`, or -1; `*length` is its size.
  int32_t LongestAt(std::string_view text, size_t* length) const;

  std::vector<Node> nodes_ = std::vector<Node>(1);
  std::array<int32_t, 256> root_ = [] {
    std::array<int32_t, 256> none;
    none.fill(-1);
    return none;
  }();  // children of the root, by byte
  std::vector<AddedToken> tokens_;
};

}  // namespace lockstep
