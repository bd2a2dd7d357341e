// Rows of keys and values as the cache stores them: for backends on the host, and for checks.
#pragma once

#include <cstdint>

#include "runtime/core/dtype.h"

namespace lockstep {

// to = from / scale in the cache's dtype: nearest-even, saturating where that is kF8E4M3. `scale`
// is KvCacheView's k_scale or v_scale.
void ToCache(const float* from, float scale, DType dtype, void* to, int64_t count);
// to = from * scale, in float32.
void FromCache(const void* from, float scale, DType dtype, float* to, int64_t count);

}  // namespace lockstep
