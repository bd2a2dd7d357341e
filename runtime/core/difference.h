// How far two results are apart, for the run-time checks that compare them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace lockstep {

// |value - expected| / scale, scale >= 0. Equal values and two NaN are no difference; a NaN or an
// infinity on one side, and any difference at scale 0, is an infinite one.
inline double RelativeDifference(float value, float expected, float scale) {
  if (value == expected || (std::isnan(value) && std::isnan(expected))) return 0;
  if (!std::isfinite(value) || !std::isfinite(expected) || scale == 0) return INFINITY;
  return std::abs(double{value} - double{expected}) / double{scale};
}

// Largest finite magnitude; 0 when there is none.
inline float LargestMagnitude(const float* values, int64_t count) {
  float largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (std::isfinite(values[i])) largest = std::max(largest, std::abs(values[i]));
  }
  return largest;
}

}  // namespace lockstep
