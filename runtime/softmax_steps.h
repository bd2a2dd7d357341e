// The arithmetic of softmax_mass.h that the host and devices share: 2^(g / 8) within a step, and
// the factors between steps.
#pragma once

#include <cstdint>

#include "runtime/core/host_device.h"

namespace lockstep {

// 2^(i / 8).
LOCKSTEP_HOST_DEVICE_INLINE constexpr double StepPower(int i) {
  constexpr double kPowers[] = {1.0,
                                1.0905077326652577,
                                1.189207115002721,
                                1.2968395546510096,
                                1.4142135623730951,
                                1.5422108254079407,
                                1.681792830507429,
                                1.8340080864093424};
  return kPowers[i];
}
// The same in units of 2^-25.
LOCKSTEP_HOST_DEVICE_INLINE constexpr uint64_t StepUnit(int i) {
  return static_cast<uint64_t>(StepPower(i) * 0x1p25 + 0.5);
}

// 2^(g / 8), g in [0, 1]: where z - floor(z) rounds to 1, too. Taylor series about g = 1/2; the
// first term left out is below (ln2 / 16)^6 / 6!.
LOCKSTEP_HOST_DEVICE_INLINE double PowerWithinStep(double g) {
  constexpr double kSlope = 0.69314718055994530942 / 8;
  constexpr double kTerm0 = 1.0442737824274138;  // 2^(1/16)
  constexpr double kTerm1 = kTerm0 * (kSlope / 1);
  constexpr double kTerm2 = kTerm1 * (kSlope / 2);
  constexpr double kTerm3 = kTerm2 * (kSlope / 3);
  constexpr double kTerm4 = kTerm3 * (kSlope / 4);
  constexpr double kTerm5 = kTerm4 * (kSlope / 5);
  const double x = g - 0.5;
  double sum = kTerm5;
  sum = sum * x + kTerm4;
  sum = sum * x + kTerm3;
  sum = sum * x + kTerm2;
  sum = sum * x + kTerm1;
  return sum * x + kTerm0;
}

}  // namespace lockstep
