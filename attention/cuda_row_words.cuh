// Rows that the blocks of one kernel, of one GPU or of several, hand to each other: every value of
// 16 bits lies in a word of its own, beside the number of the exchange. Who reads a word knows from
// itself whether it has come, so nothing is ordered behind anything: a release, which waits for all
// that its multiprocessor has under way, would take longer than the handing over (as in NCCL's LL
// protocol, with a finer grain).
//
// A word is written again only when all who wait for it have read it, and numbers of exchanges that
// follow each other in a word differ; zeroed memory has number 0.
//
// When to look is known from a counter of the blocks that have given what they had, which one
// thread of a block polls. The counter promises nothing: words may come behind it, and are waited
// for then, by one lane of a warp. All lanes of all warps together would take the L2 cache's
// bandwidth from the copies of the weights.
#pragma once

#include <cstdint>

#include "attention/cuda_tensor_core.cuh"

namespace lockstep {

struct RowExchange {
  uint32_t number;
  uint32_t wanted;           // value of `arrivals` at which it is time to look
  const uint32_t* arrivals;  // of this GPU; grows, and wraps around
  const uint32_t* abort;     // not 0: wait no more, with wrong results; null: never

  // What stands beside a value of 16 bits.
  __device__ __forceinline__ uint32_t tag() const { return number << 16; }
};

template <typename T>
__device__ __forceinline__ uint32_t RowWord(T value, const RowExchange& exchange) {
  return exchange.tag() | *reinterpret_cast<const uint16_t*>(&value);
}
template <typename T>
__device__ __forceinline__ T RowValue(uint32_t word) {
  const auto bits = static_cast<uint16_t>(word);
  return *reinterpret_cast<const T*>(&bits);
}
__device__ __forceinline__ bool IsOf(const RowExchange& exchange, uint32_t word) {
  return (word ^ exchange.tag()) < 0x10000;
}

template <typename T>
__device__ __forceinline__ void StoreRowWord(uint32_t* to, T value, const RowExchange& exchange) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(to), "r"(RowWord(value, exchange))
               : "memory");
}
__device__ __forceinline__ uint32_t LoadRowWord(const uint32_t* from) {
  uint32_t word;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(word) : "l"(from) : "memory");
  return word;
}

// Whether to give up, asked now and then.
__device__ __forceinline__ bool RowAborted(const RowExchange& exchange, uint32_t tries) {
  return tries % 1024 == 0 && exchange.abort != nullptr && LoadRowWord(exchange.abort) != 0;
}

// Of one thread, behind its block's words.
__device__ __forceinline__ void AddRowArrival(uint32_t* arrivals) {
  asm volatile("red.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(arrivals) : "memory");
}
// The same, behind plain values: who sees the counter sees them.
__device__ __forceinline__ void ReleaseRowArrival(uint32_t* arrivals) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(arrivals) : "memory");
}
// One thread of a block: until it is time to look. The block's threads, behind a barrier, see what
// was released.
__device__ __forceinline__ void WaitForRowArrivals(const RowExchange& exchange) {
  for (uint32_t tries = 1;; ++tries) {
    uint32_t now;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];"
                 : "=r"(now)
                 : "l"(exchange.arrivals)
                 : "memory");
    if (static_cast<int32_t>(now - exchange.wanted) >= 0 || RowAborted(exchange, tries)) return;
  }
}

// The whole warp: until every lane has what it wants. has() says so of what the lane has loaded,
// load() loads it again.
template <typename Has, typename Load>
__device__ __forceinline__ void WarpWaits(const RowExchange& exchange, Has has, Load load) {
  for (;;) {
    const unsigned missing = __ballot_sync(kFullWarp, !has());
    if (missing == 0) return;
    bool aborted = false;
    if (static_cast<int>(threadIdx.x % 32) == __ffs(static_cast<int>(missing)) - 1) {
      for (uint32_t tries = 1; !has() && !aborted; ++tries) {
        load();
        aborted = RowAborted(exchange, tries);
      }
    }
    if (__any_sync(kFullWarp, aborted)) return;
    if (!has()) load();
  }
}

// 8 neighbours: of 32-byte aligned words.
struct RowWords {
  uint4 low;
  uint4 high;

  __device__ __forceinline__ void Load(const uint32_t* from) {
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(low.x), "=r"(low.y), "=r"(low.z), "=r"(low.w)
                 : "l"(from)
                 : "memory");
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(high.x), "=r"(high.y), "=r"(high.z), "=r"(high.w)
                 : "l"(from + 4)
                 : "memory");
  }
  __device__ __forceinline__ bool AreOf(const RowExchange& exchange) const {
    const uint32_t tag = exchange.tag();
    return ((low.x ^ tag) | (low.y ^ tag) | (low.z ^ tag) | (low.w ^ tag) | (high.x ^ tag) |
            (high.y ^ tag) | (high.z ^ tag) | (high.w ^ tag)) < 0x10000;
  }
  // The whole warp, behind Load: where `wanted`, until they have come.
  __device__ __forceinline__ void Wait(const uint32_t* from, bool wanted,
                                       const RowExchange& exchange) {
    WarpWaits(
        exchange, [&] { return !wanted || AreOf(exchange); }, [&] { Load(from); });
  }
  // The 8 values, in 16 bits each.
  __device__ __forceinline__ uint4 Values() const {
    return {__byte_perm(low.x, low.y, 0x5410), __byte_perm(low.z, low.w, 0x5410),
            __byte_perm(high.x, high.y, 0x5410), __byte_perm(high.z, high.w, 0x5410)};
  }
};

// Two values of 32 bits, each beside the whole number of the exchange: words that are not written
// each time keep theirs, and 16 bits of it would come again. Stored and loaded by 16 bytes; either
// half may come first.
struct RowFloats {
  uint4 words;

  __device__ __forceinline__ void Load(const RowFloats* from) {
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                 : "l"(from)
                 : "memory");
  }
  __device__ __forceinline__ bool AreOf(const RowExchange& exchange) const {
    return words.y == exchange.number && words.w == exchange.number;
  }
  // The whole warp, behind Load: where `wanted`, until they have come.
  __device__ __forceinline__ void Wait(const RowFloats* from, bool wanted,
                                       const RowExchange& exchange) {
    WarpWaits(
        exchange, [&] { return !wanted || AreOf(exchange); }, [&] { Load(from); });
  }
  __device__ __forceinline__ float2 Values() const {
    return {__uint_as_float(words.x), __uint_as_float(words.z)};
  }
};

__device__ __forceinline__ void StoreRowFloats(RowFloats* to, float x, float y,
                                               const RowExchange& exchange) {
  asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to),
               "r"(__float_as_uint(x)), "r"(exchange.number), "r"(__float_as_uint(y)),
               "r"(exchange.number)
               : "memory");
}

}  // namespace lockstep
