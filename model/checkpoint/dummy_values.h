// The numbers of dummy weights: one formula for the host and for kernels, the same bits on both.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define LOCKSTEP_HOST_DEVICE __host__ __device__
#else
#define LOCKSTEP_HOST_DEVICE
#endif

namespace lockstep {

// Bijective mixers (the finalisers of MurmurHash3): nearby counters give unrelated numbers.
LOCKSTEP_HOST_DEVICE inline uint64_t Mix64(uint64_t x) {
  x = (x ^ (x >> 33)) * 0xff51afd7ed558ccdu;
  x = (x ^ (x >> 33)) * 0xc4ceb9fe1a85ec53u;
  return x ^ (x >> 33);
}
LOCKSTEP_HOST_DEVICE inline uint32_t Mix32(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x85ebca6bu;
  x = (x ^ (x >> 13)) * 0xc2b2ae35u;
  return x ^ (x >> 16);
}

// What the elements of row `row` have in common.
LOCKSTEP_HOST_DEVICE inline uint32_t DummyRowKey(uint64_t tensor_key, int64_t row) {
  return static_cast<uint32_t>(Mix64(tensor_key + static_cast<uint64_t>(row)));
}

// Uniform on [-a, a), whose standard deviation is a / sqrt(3) = 0.02.
LOCKSTEP_HOST_DEVICE inline float DummyValue(uint32_t row_key, uint32_t col) {
  constexpr float kScale = 0.02f * 1.7320508f / 2147483648.0f;
  const uint32_t bits = Mix32(row_key + col * 0x9e3779b9u);
  return static_cast<float>(static_cast<int32_t>(bits)) * kScale;
}

}  // namespace lockstep
