#include "runtime/logit_scan.h"

#include <algorithm>
#include <atomic>
#include <cfloat>
#include <functional>
#include <vector>

#include "runtime/logit_blocks.h"

namespace lockstep {

namespace {

LOCKSTEP_INLINE float BlockMaxBody(const float* x, int32_t* bad) {
  constexpr int kLanes = 16;
  float max[kLanes];
  for (int i = 0; i < kLanes; ++i) max[i] = x[i];
  for (int j = kLanes; j < kScanBlock; j += kLanes) {
    for (int i = 0; i < kLanes; ++i) max[i] = x[j + i] > max[i] ? x[j + i] : max[i];
  }
  for (int j = 0; j < kScanBlock; j += kLanes) {
    for (int i = 0; i < kLanes; ++i) bad[i] |= !(x[j + i] <= FLT_MAX);
  }
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) max[i] = max[i + width] > max[i] ? max[i + width] : max[i];
  }
  return max[0];
}
LOCKSTEP_INLINE float ScanMaxBody(const float* logits, int64_t count, float* block_max) {
  int32_t bad[16] = {};
  float max = kMinusInfinity;
  int64_t begin = 0;
  for (; begin + kScanBlock <= count; begin += kScanBlock) {
    const float block = BlockMaxBody(logits + begin, bad);
    block_max[begin / kScanBlock] = block;
    max = block > max ? block : max;
  }
  if (begin < count) {
    float block = kMinusInfinity;
    for (int64_t i = begin; i < count; ++i) {
      block = logits[i] > block ? logits[i] : block;
      bad[0] |= !(logits[i] <= FLT_MAX);
    }
    block_max[begin / kScanBlock] = block;
    max = block > max ? block : max;
  }
  for (const int32_t b : bad) {
    if (b != 0) return std::numeric_limits<float>::quiet_NaN();
  }
  return max;
}
LOCKSTEP_VECTORISED(float, ScanMax, (const float* logits, int64_t count, float* block_max),
                    (logits, count, block_max))

LOCKSTEP_INLINE int64_t CollectRangeBody(const LogitSlice& slice, uint32_t low, uint32_t high,
                                         const Survivors& survivors, std::span<LogitAndId> out) {
  size_t count = 0;
  VisitSurvivors(slice, survivors, low, high, [&](int64_t i) LOCKSTEP_ALWAYS_INLINE {
    if (count == out.size()) return false;
    out[count++] = {slice.logits[i], static_cast<int32_t>(slice.vocab.begin + i)};
    return true;
  });
  return static_cast<int64_t>(count);
}
LOCKSTEP_VECTORISED(int64_t, CollectRange,
                    (const LogitSlice& slice, uint32_t low, uint32_t high,
                     const Survivors& survivors, std::span<LogitAndId> out),
                    (slice, low, high, survivors, out))

LOCKSTEP_INLINE int64_t FindTieEndBody(const LogitSlice& slice, uint32_t key, int64_t count) {
  const float logit = FromOrderKey(key);
  int64_t end = slice.size();
  VisitRange(slice, 0, slice.size(), logit, logit, [&](int64_t i) LOCKSTEP_ALWAYS_INLINE {
    if (--count > 0) return true;
    end = i + 1;
    return false;
  });
  return end;
}
LOCKSTEP_VECTORISED(int64_t, FindTieEnd, (const LogitSlice& slice, uint32_t key, int64_t count),
                    (slice, key, count))

std::atomic<VectorIsa> vector_isa{BestVectorIsa()};

}  // namespace

VectorIsa BestVectorIsa() {
#if defined(__x86_64__) && defined(__GNUC__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    return VectorIsa::kAvx512;
  }
  if (__builtin_cpu_supports("avx2")) return VectorIsa::kAvx2;
#endif
  return VectorIsa::kPortable;
}

VectorIsa GetVectorIsa() { return vector_isa.load(std::memory_order_relaxed); }

void SetVectorIsa(VectorIsa isa) { vector_isa.store(std::min(isa, BestVectorIsa())); }

float ScanMax(const float* logits, int64_t count, float* block_max) {
  return ScanMaxVectorised(logits, count, block_max);
}

// The k-th largest of the blocks' maxima is a bar that at least k ids reach, and above which are
// only ids of fewer than k blocks.
int64_t SelectTop(const LogitSlice& slice, std::span<LogitAndId> out) {
  const int64_t wanted = std::min(static_cast<int64_t>(out.size()), slice.size());
  if (wanted == 0) return 0;
  const int64_t num_blocks = NumScanBlocks(slice.size());
  thread_local std::vector<float> maxima;
  thread_local std::vector<LogitAndId> above;  // above the bar
  float bar = kMinusInfinity;
  if (wanted <= num_blocks) {
    maxima.assign(slice.block_max, slice.block_max + num_blocks);
    std::nth_element(maxima.begin(), maxima.begin() + wanted - 1, maxima.end(), std::greater<>());
    bar = maxima[static_cast<size_t>(wanted - 1)];
  }
  above.clear();
  int64_t ties = 0;  // equal to the bar, lowest ids, from the front of `out`
  for (int64_t block = 0; block < num_blocks; ++block) {
    if (slice.block_max[block] < bar) continue;
    const int64_t end = std::min((block + 1) * kScanBlock, slice.size());
    for (int64_t i = block * kScanBlock; i < end; ++i) {
      const float logit = slice.logits[i];
      if (logit < bar) continue;
      const LogitAndId entry{logit, static_cast<int32_t>(slice.vocab.begin + i)};
      if (logit > bar) {
        above.push_back(entry);
      } else if (ties < wanted) {
        out[static_cast<size_t>(ties++)] = entry;
      }
    }
  }
  const int64_t num_above = std::min(wanted, static_cast<int64_t>(above.size()));
  std::partial_sort(above.begin(), above.begin() + num_above, above.end(), Better);
  std::copy_backward(out.begin(), out.begin() + (wanted - num_above), out.begin() + wanted);
  std::copy_n(above.begin(), num_above, out.begin());
  return wanted;
}

int64_t CollectRange(const LogitSlice& slice, uint32_t low, uint32_t high,
                     const Survivors& survivors, std::span<LogitAndId> out) {
  return CollectRangeVectorised(slice, low, high, survivors, out);
}

int64_t FindTieEnd(const LogitSlice& slice, uint32_t key, int64_t count) {
  return count <= 0 ? 0 : FindTieEndVectorised(slice, key, count);
}

}  // namespace lockstep
