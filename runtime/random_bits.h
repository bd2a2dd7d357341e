// The random bits of the Gumbel noise, for the host and for devices: those of id i are element i of
// a SplitMix64 stream (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014)
// that starts at RowKey.
#pragma once

#include <cstdint>

#include "runtime/core/host_device.h"

namespace lockstep {

inline constexpr uint64_t kGoldenGamma = 0x9e3779b97f4a7c15;

LOCKSTEP_HOST_DEVICE_INLINE uint64_t Mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}
LOCKSTEP_HOST_DEVICE_INLINE uint64_t RowKey(uint64_t seed, int64_t position) {
  return Mix(Mix(seed + kGoldenGamma) ^ (static_cast<uint64_t>(position) * kGoldenGamma));
}
LOCKSTEP_HOST_DEVICE_INLINE uint64_t RandomBits(uint64_t row_key, uint64_t id) {
  return Mix(row_key + (id + 1) * kGoldenGamma);
}

}  // namespace lockstep
