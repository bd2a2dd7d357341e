// For the passes over logits (logit_scan.cc, softmax_mass.cc, gumbel_race.cc) alone: plain loops
// over blocks, compiled for several instruction sets and chosen at run time. Baseline x86-64 has
// neither 64-bit products nor floor.
//
// These files are compiled with -ffp-contract=off, so that all instruction sets give the same bits.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>

#include "runtime/logit_scan.h"

#define LOCKSTEP_ALWAYS_INLINE __attribute__((always_inline))
#define LOCKSTEP_INLINE inline LOCKSTEP_ALWAYS_INLINE

// Defines name##Vectorised as name##Body, once for each instruction set.
#if defined(__x86_64__) && defined(__GNUC__)
#define LOCKSTEP_VECTORISED(result, name, parameters, arguments)                                \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")))         \
  result name##Avx512 parameters {                                                              \
    return name##Body arguments;                                                                \
  }                                                                                             \
  __attribute__((target("avx2"))) result name##Avx2 parameters { return name##Body arguments; } \
  result name##Vectorised parameters {                                                          \
    if (GetVectorIsa() == VectorIsa::kAvx512) return name##Avx512 arguments;                    \
    if (GetVectorIsa() == VectorIsa::kAvx2) return name##Avx2 arguments;                        \
    return name##Body arguments;                                                                \
  }
#else
#define LOCKSTEP_VECTORISED(result, name, parameters, arguments) \
  result name##Vectorised parameters { return name##Body arguments; }
#endif

namespace lockstep {

// Rounds 0 <= x < 2^51 to an integer, without an instruction for it.
LOCKSTEP_INLINE uint64_t ToInteger(double x) {
  return std::bit_cast<uint64_t>(x + 0x1p52) & ((uint64_t{1} << 52) - 1);
}
LOCKSTEP_INLINE double ToDouble(uint64_t x) {  // x < 2^52
  return std::bit_cast<double>(x | 0x4330000000000000) - 0x1p52;
}

// The block that begins at `begin`; at the end of a row, filled up with -infinity.
LOCKSTEP_INLINE const float* BlockAt(const LogitSlice& slice, int64_t begin, float* buffer) {
  const int64_t count = slice.size() - begin;
  if (count >= kScanBlock) return slice.logits + begin;
  for (int64_t i = 0; i < kScanBlock; ++i) {
    buffer[i] = i < count ? slice.logits[begin + i] : kMinusInfinity;
  }
  return buffer;
}

// Bits [begin, end) of a block's 64.
LOCKSTEP_INLINE uint64_t BitRange(int64_t begin, int64_t end) {
  const uint64_t below_end = end >= kScanBlock ? ~uint64_t{0} : (uint64_t{1} << end) - 1;
  return begin <= 0 ? below_end : below_end & (~uint64_t{0} << begin);
}

// Bit i: marks[i], which is 0 or 1. The product brings the lowest bits of eight bytes side by side.
LOCKSTEP_INLINE uint64_t PackMarks(const uint8_t* marks) {
  uint64_t bits = 0;
  for (int i = 0; i < kScanBlock; i += 8) {
    uint64_t eight;
    std::memcpy(&eight, marks + i, sizeof(eight));
    bits |= (eight * 0x0102040810204080 >> 56) << i;
  }
  return bits;
}

// Calls visit(index) for the indices in [begin, end) with a logit in [low, high], in order, until
// it returns false; returns whether it never did.
template <typename Visit>
LOCKSTEP_INLINE bool VisitRange(const LogitSlice& slice, int64_t begin, int64_t end, float low,
                                float high, const Visit& visit) {
  float buffer[kScanBlock];
  for (int64_t block = begin / kScanBlock * kScanBlock; block < end; block += kScanBlock) {
    if (slice.block_max[block / kScanBlock] < low) continue;
    const float* x = BlockAt(slice, block, buffer);
    alignas(64) uint8_t marks[kScanBlock];
    for (int i = 0; i < kScanBlock; ++i) marks[i] = (x[i] >= low ? 1 : 0) & (x[i] <= high ? 1 : 0);
    uint64_t matches = PackMarks(marks);
    for (matches &= BitRange(begin - block, end - block); matches != 0; matches &= matches - 1) {
      if (!visit(block + std::countr_zero(matches))) return false;
    }
  }
  return true;
}

// The same for survivors with keys in [low, high].
template <typename Visit>
LOCKSTEP_INLINE bool VisitSurvivors(const LogitSlice& slice, const Survivors& survivors,
                                    uint32_t low, uint32_t high, const Visit& visit) {
  const int64_t tie_end = std::clamp<int64_t>(survivors.tie_end, 0, slice.size());
  // No key is that of -0; as a float it would let +0 in.
  const float high_logit = FromOrderKey(high == OrderKey(0) - 1 ? high - 1 : high);
  return VisitRange(slice, 0, tie_end, FromOrderKey(std::max(low, survivors.floor)), high_logit,
                    visit) &&
         VisitRange(slice, tie_end, slice.size(), FromOrderKey(std::max(low, survivors.floor + 1)),
                    high_logit, visit);
}

}  // namespace lockstep
