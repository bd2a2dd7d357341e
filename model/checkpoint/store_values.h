// The last step of every reader: values into the caller's rows, in the caller's dtype.
#pragma once

#include <cstdint>

#include "runtime/core/dtype.h"

namespace lockstep {

// Converts `count` values to dtype `to`, nearest-even. False when a finite value is above 65504 and
// `to` is float16: it would become infinite.
[[nodiscard]] bool StoreValues(DType from, const void* src, DType to, void* dst, int64_t count);

}  // namespace lockstep
