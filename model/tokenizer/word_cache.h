// Remembers the ids of short words.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string_view>

namespace lockstep {

// A direct-mapped table of fixed size (2 MiB): a new word takes the place of an older one. Not
// thread-safe.
class WordCache {
 public:
  static constexpr size_t kMaxWordBytes = 20;
  static constexpr size_t kMaxIds = 8;

  static uint64_t Hash(std::string_view word);

  // The ids of `word` (`hash` is its Hash), or an empty span. Valid until the next Insert.
  std::span<const int32_t> Find(std::string_view word, uint64_t hash) const {
    const Entry& entry = entries_[hash % kEntries];
    if (entry.hash != hash || entry.size != word.size() ||
        std::memcmp(entry.word, word.data(), word.size()) != 0) {
      return {};
    }
    return {entry.ids, entry.count};
  }

  // Does nothing when the word or its ids are too long.
  void Insert(std::string_view word, uint64_t hash, std::span<const int32_t> ids) {
    if (word.size() > kMaxWordBytes || ids.empty() || ids.size() > kMaxIds) return;
    Entry& entry = entries_[hash % kEntries];
    entry.hash = hash;
    entry.size = static_cast<uint16_t>(word.size());
    entry.count = static_cast<uint16_t>(ids.size());
    std::memcpy(entry.word, word.data(), word.size());
    std::memcpy(entry.ids, ids.data(), ids.size_bytes());
  }

 private:
  static constexpr size_t kEntries = size_t{1} << 15;
  struct alignas(64) Entry {
    uint64_t hash = 0;
    uint16_t size = 0;  // 0: unused
    uint16_t count = 0;
    char word[kMaxWordBytes];
    int32_t ids[kMaxIds];
  };
  static_assert(sizeof(Entry) == 64);

  std::unique_ptr<Entry[]> entries_ = std::make_unique<Entry[]>(kEntries);
};

// Multiply-and-fold over 8-byte words; the last one overlaps. Only for words of at most
// kMaxWordBytes.
inline uint64_t WordCache::Hash(std::string_view word) {
  const auto load = [](const char* p, size_t n) {
    uint64_t value = 0;
    std::memcpy(&value, p, n);
    return value;
  };
  const auto mix = [](uint64_t a, uint64_t b) {
    const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
    return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
  };
  const size_t n = word.size();
  const char* p = word.data();
  uint64_t a = 0, b = 0, c = 0;
  if (n >= 8) {
    a = load(p, 8);
    b = load(p + n - 8, 8);
    if (n > 16) c = load(p + 8, 8);
  } else if (n >= 4) {
    a = load(p, 4);
    b = load(p + n - 4, 4);
  } else if (n > 0) {
    a = load(p, 1) << 16 | load(p + n / 2, 1) << 8 | load(p + n - 1, 1);
  }
  return mix(mix(a ^ 0x9E3779B97F4A7C15u, b ^ 0xD6E8FEB86659FD93u ^ n), c ^ 0xA0761D6478BD642Fu);
}

}  // namespace lockstep
