#pragma once

#include <cstdint>
#include <span>

namespace lockstep {

// out[i] = ((parts[0][i] + parts[1][i]) + parts[2][i]) + ... in float32: the one order of sums
// (communicator.h). At least 2 parts of `count` values; `out` may be one of them.
void SumInRankOrder(std::span<const float* const> parts, float* out, int64_t count);

}  // namespace lockstep
