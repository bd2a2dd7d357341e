#include "parallel/rank_order_sum.h"

#include <algorithm>
#include <cstring>

namespace lockstep {

void SumInRankOrder(std::span<const float* const> parts, float* out, int64_t count) {
  constexpr int64_t kTile = 1024;  // stays in L1 while the parts stream through
  float sum[kTile];
  for (int64_t begin = 0; begin < count; begin += kTile) {
    const int64_t n = std::min(kTile, count - begin);
    const float* first = parts[0] + begin;
    const float* second = parts[1] + begin;
    for (int64_t i = 0; i < n; ++i) sum[i] = first[i] + second[i];
    for (const float* part : parts.subspan(2)) {
      for (int64_t i = 0; i < n; ++i) sum[i] += part[begin + i];
    }
    std::memcpy(out + begin, sum, n * sizeof(float));
  }
}

}  // namespace lockstep
