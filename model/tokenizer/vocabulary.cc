#include "model/tokenizer/vocabulary.h"

#include <algorithm>
#include <bit>
#include <functional>
#include <utility>

namespace lockstep {

namespace {

constexpr uint64_t kTag = ~uint64_t{0} << 32;  // the bits of a slot that come from the hash
constexpr int64_t kMaxTokens =
    int64_t{1} << 24;  // far above any published vocabulary; bounds what a bad id allocates

absl::StatusOr<Merge> MakeMerge(std::string_view left, std::string_view right, size_t entry,
                                const Vocabulary& vocabulary, const std::string& where) {
  std::string joined;
  joined.reserve(left.size() + right.size());
  joined.append(left).append(right);
  Merge merge{vocabulary.Find(left), vocabulary.Find(right), vocabulary.Find(joined),
              static_cast<uint32_t>(entry)};
  for (const auto& [id, token] : {std::pair<int32_t, std::string_view>{merge.left, left},
                                  {merge.right, right},
                                  {merge.result, joined}}) {
    if (id < 0) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "%s: merges[%d] (\"%s\" + \"%s\") names \"%s\", which is not in the vocabulary", where,
          entry, left, right, token));
    }
  }
  return merge;
}

absl::StatusOr<Merge> SplitMerge(std::string_view text, size_t entry, const Vocabulary& vocabulary,
                                 const std::string& where) {
  const size_t space = text.find(' ');
  if (space == std::string_view::npos || text.find(' ', space + 1) != std::string_view::npos) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s: merges[%d] is \"%s\", not two tokens with one space between", where, entry, text));
  }
  return MakeMerge(text.substr(0, space), text.substr(space + 1), entry, vocabulary, where);
}

}  // namespace

absl::StatusOr<Vocabulary> Vocabulary::FromJson(const Json& json, const std::string& where) {
  if (!json.is_object())
    return absl::InvalidArgumentError(where +
                                      ": the vocabulary must be an object of tokens and ids");
  int64_t size = 0;
  for (const auto& [token, id] : json.items()) {
    if (!id.is_number_integer() || id.get<int64_t>() < 0 || id.get<int64_t>() >= kMaxTokens) {
      return absl::InvalidArgumentError(
          absl::StrFormat("%s: token \"%s\" has the id %s; ids are integers from 0 to %d", where,
                          token, DumpJson(id), kMaxTokens - 1));
    }
    size = std::max(size, id.get<int64_t>() + 1);
  }
  Vocabulary vocabulary;
  vocabulary.tokens_.resize(size);
  vocabulary.used_.resize(size);
  for (const auto& [token, id_json] : json.items()) {
    const int64_t id = id_json.get<int64_t>();
    if (vocabulary.used_[id]) {
      return absl::InvalidArgumentError(
          absl::StrFormat("%s: the tokens \"%s\" and \"%s\" share the id %d", where,
                          vocabulary.tokens_[id], token, id));
    }
    vocabulary.used_[id] = true;
    vocabulary.tokens_[id] = token;
  }
  LOCKSTEP_RETURN_IF_ERROR(vocabulary.Index(where));
  return vocabulary;
}

absl::StatusOr<Vocabulary> Vocabulary::FromList(std::vector<std::string> tokens,
                                                const std::string& where) {
  if (static_cast<int64_t>(tokens.size()) > kMaxTokens) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s: %d tokens are too many", where, tokens.size()));
  }
  Vocabulary vocabulary;
  vocabulary.used_.assign(tokens.size(), true);
  vocabulary.tokens_ = std::move(tokens);
  LOCKSTEP_RETURN_IF_ERROR(vocabulary.Index(where));
  return vocabulary;
}

absl::Status Vocabulary::Index(const std::string& where) {
  slots_.assign(std::bit_ceil(2 * tokens_.size() + 1), 0);
  for (int32_t id = 0; id < size(); ++id) {
    if (!used_[id]) continue;
    if (const int32_t other = Find(tokens_[id]); other >= 0) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "%s: token \"%s\" stands at the ids %d and %d", where, tokens_[id], other, id));
    }
    const uint64_t hash = std::hash<std::string_view>()(tokens_[id]);
    size_t slot = hash & (slots_.size() - 1);
    while (slots_[slot] != 0) slot = (slot + 1) & (slots_.size() - 1);
    slots_[slot] = (hash & kTag) | static_cast<uint64_t>(id + 1);
  }
  return absl::OkStatus();
}

int32_t Vocabulary::Find(std::string_view token) const {
  const uint64_t hash = std::hash<std::string_view>()(token);
  const size_t mask = slots_.size() - 1;
  for (size_t slot = hash & mask; slots_[slot] != 0; slot = (slot + 1) & mask) {
    if ((slots_[slot] & kTag) != (hash & kTag)) continue;
    const auto id = static_cast<int32_t>(slots_[slot] & ~kTag) - 1;
    if (tokens_[id] == token) return id;
  }
  return -1;
}

absl::StatusOr<std::vector<Merge>> ParseMerges(const Json& json, const Vocabulary& vocabulary,
                                               const std::string& where) {
  std::vector<Merge> merges;
  merges.reserve(json.size());
  size_t entry = 0;
  for (const Json& item : json) {
    if (entry == 0 && item.is_string() &&
        item.get_ref<const std::string&>().rfind("#version", 0) == 0) {
      ++entry;  // the first line of a merges.txt
      continue;
    }
    absl::StatusOr<Merge> merge = Merge{};
    if (item.is_string()) {
      merge = SplitMerge(item.get_ref<const std::string&>(), entry, vocabulary, where);
    } else if (item.is_array() && item.size() == 2 && item[0].is_string() && item[1].is_string()) {
      merge = MakeMerge(item[0].get_ref<const std::string&>(),
                        item[1].get_ref<const std::string&>(), entry, vocabulary, where);
    } else {
      merge = absl::InvalidArgumentError(absl::StrFormat(
          "%s: merges[%d] is neither \"left right\" nor [\"left\", \"right\"]", where, entry));
    }
    if (!merge.ok()) return merge.status();
    merges.push_back(*merge);
    ++entry;
  }
  return merges;
}

absl::StatusOr<std::vector<Merge>> ParseMerges(const std::vector<std::string>& merges,
                                               const Vocabulary& vocabulary,
                                               const std::string& where) {
  std::vector<Merge> parsed;
  parsed.reserve(merges.size());
  for (size_t entry = 0; entry < merges.size(); ++entry) {
    LOCKSTEP_ASSIGN_OR_RETURN(Merge merge, SplitMerge(merges[entry], entry, vocabulary, where));
    parsed.push_back(merge);
  }
  return parsed;
}

}  // namespace lockstep
