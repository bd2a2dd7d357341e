// One row's local logits, and passes over them that find the largest, the best few, and those
// between two bounds.
//
// Rows hold no NaN and no +infinity, but for ScanMax. All functions are thread-safe.
#pragma once

#include <bit>
#include <cstdint>
#include <limits>
#include <span>

#include "runtime/core/range.h"

namespace lockstep {

inline constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// Passes skip blocks by their largest logit.
inline constexpr int64_t kScanBlock = 64;
inline int64_t NumScanBlocks(int64_t count) { return (count + kScanBlock - 1) / kScanBlock; }

// One row's local columns.
struct LogitSlice {
  const float* logits = nullptr;     // [size()]
  const float* block_max = nullptr;  // [NumScanBlocks(size())], from ScanMax
  Range vocab;                       // their ids

  int64_t size() const { return vocab.size(); }
};

// Instruction sets that the passes are compiled for, in rising order: the best that the CPU has is
// used, and all give the same bits. Tests set others; not above the best.
enum class VectorIsa { kPortable, kAvx2, kAvx512 };
VectorIsa BestVectorIsa();
VectorIsa GetVectorIsa();
void SetVectorIsa(VectorIsa isa);

// The largest of logits[0, count), or NaN when there is a NaN or +infinity.
float ScanMax(const float* logits, int64_t count, float* block_max);

// Unsigned integers in the order of the floats; both zeros have that of +0.
inline uint32_t OrderKey(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x + 0.0f);
  return (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
}
inline float FromOrderKey(uint32_t key) {
  return std::bit_cast<float>((key >> 31) != 0 ? key & 0x7fffffffu : ~key);
}
inline constexpr uint32_t kLowestKey = 0x007fffffu;  // of -infinity

struct LogitAndId {
  float logit = 0;
  int32_t id = 0;
};
inline bool Better(const LogitAndId& a, const LogitAndId& b) {
  return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
}
// The min(out.size(), size) best, best first, lowest ids on ties; returns their number.
int64_t SelectTop(const LogitSlice& slice, std::span<LogitAndId> out);

// What filters leave of a slice: keys from `floor` on before index `tie_end`, above it from there
// on. By default nothing is gone but -infinity, which never wins.
struct Survivors {
  uint32_t floor = kLowestKey;
  int64_t tie_end = 0;
};
// Up to out.size() survivors with keys in [low, high], by rising id; returns their number.
int64_t CollectRange(const LogitSlice& slice, uint32_t low, uint32_t high,
                     const Survivors& survivors, std::span<LogitAndId> out);
// The index behind the `count`-th id whose key is `key`; the slice's size when there are fewer.
int64_t FindTieEnd(const LogitSlice& slice, uint32_t key, int64_t count);

}  // namespace lockstep
