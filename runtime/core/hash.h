// Fast non-cryptographic hashes (XXH3). Equal on all ranks of one build; not stable across builds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

namespace lockstep {

struct Hash128 {
  uint64_t low = 0;
  uint64_t high = 0;

  bool operator==(const Hash128&) const = default;
  // For Abseil's containers: the bits are well mixed already.
  template <typename H>
  friend H AbslHashValue(H h, const Hash128& hash) {
    return H::combine(std::move(h), hash.low);
  }
};

// `seed`: the hash of what came before, to chain pieces.
uint64_t HashBytes(const void* data, size_t bytes, uint64_t seed);
// The hash of `previous` followed by the bytes.
Hash128 HashChained(const Hash128& previous, const void* data, size_t bytes);

}  // namespace lockstep
