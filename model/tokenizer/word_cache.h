// Remembers the ids of short words.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string_view>

namespace lockstep {

// A table of fixed size (2 MiB) in which a word has two places; a new word takes the place of an
// older one. Not thread-safe.
class WordCache {
 public:
  static constexpr size_t kMaxWordBytes = 24;
  static constexpr size_t kMaxIds = 9;

  // A word as numbers: up to three overlapping 8-byte loads cover it, and together with the size
  // they determine it.
  struct Key {
    uint64_t first = 0, last = 0, middle = 0;
    uint32_t size = 0;

    bool operator==(const Key&) const = default;
  };
  // `word` has 1 to kMaxWordBytes bytes.
  static Key MakeKey(std::string_view word);

  // The ids of the word, or an empty span. Valid until the next Insert.
  std::span<const int32_t> Find(const Key& key) const {
    const Entry* bucket = entries_.get() + Bucket(key);
    for (int i = 0; i < 2; ++i) {
      if (bucket[i].key == key) return {bucket[i].ids, bucket[i].count};
    }
    return {};
  }

  // Does nothing when there are too many ids.
  void Insert(const Key& key, std::span<const int32_t> ids) {
    if (ids.empty() || ids.size() > kMaxIds) return;
    Entry* bucket = entries_.get() + Bucket(key);
    bucket[1] = bucket[0];
    bucket[0].key = key;
    bucket[0].count = static_cast<uint32_t>(ids.size());
    std::copy(ids.begin(), ids.end(), bucket[0].ids);
  }

 private:
  static constexpr size_t kBuckets = size_t{1} << 14;
  struct Entry {
    Key key;  // size 0: unused
    uint32_t count;
    int32_t ids[kMaxIds];
  };

  static size_t Bucket(const Key& key) {
    const auto mix = [](uint64_t a, uint64_t b) {
      const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
      return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
    };
    const uint64_t ends =
        mix(key.first ^ 0x9E3779B97F4A7C15u, key.last ^ 0xD6E8FEB86659FD93u ^ key.size);
    return mix(ends, key.middle ^ 0xA0761D6478BD642Fu) % kBuckets * 2;
  }

  std::unique_ptr<Entry[]> entries_ = std::make_unique<Entry[]>(kBuckets * 2);
};

inline WordCache::Key WordCache::MakeKey(std::string_view word) {
  const auto load8 = [](const char* p) {
    uint64_t value;
    std::memcpy(&value, p, 8);
    return value;
  };
  const auto load4 = [](const char* p) {
    uint32_t value;
    std::memcpy(&value, p, 4);
    return value;
  };
  const auto load1 = [](const char* p) { return uint64_t{static_cast<unsigned char>(*p)}; };
  const size_t n = word.size();
  const char* p = word.data();
  Key key;
  key.size = static_cast<uint32_t>(n);
  if (n >= 8) {
    key.first = load8(p);
    key.last = load8(p + n - 8);
    if (n > 16) key.middle = load8(p + 8);
  } else if (n >= 4) {
    key.first = load4(p);
    key.last = load4(p + n - 4);
  } else {
    key.first = load1(p) << 16 | load1(p + n / 2) << 8 | load1(p + n - 1);
  }
  return key;
}

}  // namespace lockstep
