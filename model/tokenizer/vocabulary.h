// The model's own tokens, by id and by spelling.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/core/json.h"
#include "runtime/core/status.h"

namespace lockstep {

// Immutable; thread-safe.
class Vocabulary {
 public:
  // An object {"token": id, ...}; ids may have gaps. InvalidArgument for an id that two tokens
  // share, or that is out of range.
  static absl::StatusOr<Vocabulary> FromJson(const Json& json, const std::string& where);
  // tokens[id]. InvalidArgument when two are equal.
  static absl::StatusOr<Vocabulary> FromList(std::vector<std::string> tokens,
                                             const std::string& where);

  int32_t size() const { return static_cast<int32_t>(tokens_.size()); }  // largest id + 1
  bool Has(int32_t id) const { return id >= 0 && id < size() && used_[id]; }
  const std::string& Token(int32_t id) const { return tokens_[id]; }
  // The id, or -1.
  int32_t Find(std::string_view token) const;

 private:
  absl::Status Index(const std::string& where);

  std::vector<std::string> tokens_;
  std::vector<bool> used_;
  // Open addressing; a slot holds the upper half of the hash and the id + 1, 0: free.
  std::vector<uint64_t> slots_ = std::vector<uint64_t>(1);
};

// A merge of two neighbouring tokens. The lowest rank goes first; of equal ranks the leftmost.
struct Merge {
  int32_t left;
  int32_t right;
  int32_t result;
  uint32_t rank;
};

// Merges as strings "left right" or as pairs ["left", "right"], best first. InvalidArgument with
// the entry's number (from 0) when an entry is malformed or names a token that the vocabulary
// lacks.
absl::StatusOr<std::vector<Merge>> ParseMerges(const Json& json, const Vocabulary& vocabulary,
                                               const std::string& where);
absl::StatusOr<std::vector<Merge>> ParseMerges(const std::vector<std::string>& merges,
                                               const Vocabulary& vocabulary,
                                               const std::string& where);

}  // namespace lockstep
