#include "tests/bench/ceilings.h"

#include <algorithm>
#include <chrono>

#include "model/cpu_isa.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace lockstep {

namespace {

// Of a piece of work: 12 us or more. A thread that wakes up late gets fewer pieces than others.
constexpr int64_t kPeakIterations = 4000;
constexpr int64_t kPeakPieces = 64;  // a thread
// The best counts: after a pause the system may take a millisecond to give a thread its own core.
constexpr int kPeakRuns = 6;
constexpr int kSums = 12;  // latency 4 to 6 cycles, two a cycle

// Four streams of 16 KB side by side, each asking for what it needs 24 lines later: of the ways
// tried, the fastest on Zen 4 (one stream without prefetching reads 3% to 25% less).
#if defined(__x86_64__)
__attribute__((target_clones("avx512f", "avx2", "default")))
#endif
uint64_t
XorAll(const uint64_t* words, int64_t count) {
  constexpr int64_t kLine = 8;  // words
  constexpr int64_t kStream = 256 * kLine;
  constexpr int64_t kAhead = 24 * kLine;
  uint64_t lanes[4 * kLine] = {};
  int64_t block = 0;
  for (; block + 4 * kStream <= count; block += 4 * kStream) {
    for (int64_t i = 0; i < kStream; i += kLine) {
      const int64_t ahead = i + kAhead < kStream ? i + kAhead : i + kAhead + 3 * kStream;
      for (int64_t s = 0; s < 4; ++s) {
        const uint64_t* const stream = words + block + s * kStream;
        __builtin_prefetch(stream + ahead, 0, 2);
        for (int64_t l = 0; l < kLine; ++l) lanes[s * kLine + l] ^= stream[i + l];
      }
    }
  }
  for (; block < count; ++block) lanes[0] ^= words[block];
  uint64_t all = 0;
  for (uint64_t lane : lanes) all ^= lane;
  return all;
}

// Each returns the operations it did. The empty asm keeps the compiler from folding the sums.
#if defined(__x86_64__)
__attribute__((target("avx512f,avx512bf16"))) double SpinBf16() {
  __m512 sums[kSums] = {};
  const __m512bh a = reinterpret_cast<__m512bh>(_mm512_set1_epi32(0x3f803f80));  // pairs of 1
  for (int64_t i = 0; i < kPeakIterations; ++i) {
#pragma GCC unroll 12
    for (int s = 0; s < kSums; ++s) {
      sums[s] = _mm512_dpbf16_ps(sums[s], a, a);
      asm volatile("" : "+v"(sums[s]));
    }
  }
  return 64.0 * kSums * kPeakIterations;
}

__attribute__((target("avx512f"))) double SpinAvx512() {
  __m512 sums[kSums] = {};
  const __m512 a = _mm512_set1_ps(1.0f);
  for (int64_t i = 0; i < kPeakIterations; ++i) {
#pragma GCC unroll 12
    for (int s = 0; s < kSums; ++s) {
      sums[s] = _mm512_fmadd_ps(a, a, sums[s]);
      asm volatile("" : "+v"(sums[s]));
    }
  }
  return 32.0 * kSums * kPeakIterations;
}

__attribute__((target("avx2,fma"))) double SpinAvx2() {
  __m256 sums[kSums] = {};
  const __m256 a = _mm256_set1_ps(1.0f);
  for (int64_t i = 0; i < kPeakIterations; ++i) {
#pragma GCC unroll 12
    for (int s = 0; s < kSums; ++s) {
      sums[s] = _mm256_fmadd_ps(a, a, sums[s]);
      asm volatile("" : "+x"(sums[s]));
    }
  }
  return 16.0 * kSums * kPeakIterations;
}
#endif

double SpinPortable() {
  using Float4 = float __attribute__((vector_size(16)));
  Float4 sums[kSums] = {};
  Float4 a = {1, 1, 1, 1};
  for (int64_t i = 0; i < kPeakIterations; ++i) {
#pragma GCC unroll 12
    for (int s = 0; s < kSums; ++s) sums[s] += a * a;
    asm volatile("" : : "g"(&sums), "g"(&a) : "memory");
  }
  return 8.0 * kSums * kPeakIterations;
}

double Spin(DType dtype) {
#if defined(__x86_64__)
  switch (BestCpuIsa()) {
    case CpuIsa::kAvx512Bf16:
      return dtype == DType::kBF16 ? SpinBf16() : SpinAvx512();
    case CpuIsa::kAvx512:
      return SpinAvx512();
    case CpuIsa::kAvx2:
      return SpinAvx2();
    case CpuIsa::kPortable:
      break;
  }
#endif
  return SpinPortable();
}

}  // namespace

double NowSeconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double Median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

double ReadBytesPerSecond(const Buffer& memory, ThreadPool& threads) {
  const int64_t count = memory.size_bytes() / static_cast<int64_t>(sizeof(uint64_t));
  const double start = NowSeconds();
  threads.ParallelFor(count, 4096, [&](int64_t begin, int64_t end) {
    volatile uint64_t sink = XorAll(memory.as<uint64_t>() + begin, end - begin);
    (void)sink;
  });
  return static_cast<double>(memory.size_bytes()) / (NowSeconds() - start);
}

double PeakFlopsPerSecond(DType dtype, ThreadPool& threads) {
  double best = 0;
  for (int run = 0; run < kPeakRuns; ++run) {
    std::vector<double> done(kPeakPieces * threads.num_threads());
    const double start = NowSeconds();
    threads.ParallelFor(static_cast<int64_t>(done.size()), 1, [&](int64_t begin, int64_t end) {
      for (int64_t piece = begin; piece < end; ++piece) done[piece] = Spin(dtype);
    });
    const double seconds = NowSeconds() - start;
    double all = 0;
    for (double flops : done) all += flops;
    best = std::max(best, all / seconds);
  }
  return best;
}

void FillUniform(DType dtype, const Buffer& buffer) {
  constexpr int64_t kChunk = 1 << 16;
  std::vector<float> values(kChunk);
  uint32_t state = 1;
  for (float& value : values) {
    state = state * 1664525u + 1013904223u;
    value = static_cast<float>(static_cast<int32_t>(state)) * 0x1p-31f;
  }
  const int64_t size = SizeOf(dtype);
  for (int64_t at = 0; at < buffer.size_bytes(); at += kChunk * size) {
    const int64_t count = std::min(kChunk, (buffer.size_bytes() - at) / size);
    Convert(DType::kF32, values.data(), dtype, buffer.as<char>() + at, count);
  }
}

}  // namespace lockstep
