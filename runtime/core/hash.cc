#include "runtime/core/hash.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace lockstep {

uint64_t HashBytes(const void* data, size_t bytes, uint64_t seed) {
  return XXH3_64bits_withSeed(data, bytes, seed);
}

Hash128 HashChained(const Hash128& previous, const void* data, size_t bytes) {
  XXH3_state_t state;
  XXH3_128bits_reset(&state);
  XXH3_128bits_update(&state, &previous, sizeof(previous));
  XXH3_128bits_update(&state, data, bytes);
  const XXH128_hash_t hash = XXH3_128bits_digest(&state);
  return {.low = hash.low64, .high = hash.high64};
}

}  // namespace lockstep
