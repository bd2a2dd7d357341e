// The kernel of products of few rows: see cuda_skinny.h.
//
// A block has a warpgroup that multiplies, and two producers: a thread that fetches weights, which
// wait for nobody but the ring, and one that fetches x when the kernel before has ended. Both
// copies of a stage have a barrier of their own.
#pragma once

#include "model/cuda_kernel.cuh"
#include "runtime/core/cuda_async_copy.cuh"
#include "runtime/core/cuda_wgmma.cuh"

namespace lockstep {

inline constexpr int kSkinnyPanels = 2;  // of a chunk
inline constexpr int kSkinnyChunkCols = kSkinnyPanels * kPanelColumns;
inline constexpr int kSkinnyConsumers = 128;
inline constexpr int kSkinnyThreads = kSkinnyConsumers + 64;  // a warp a producer
// Chunks of weights on their way to a block at a time, 64 KB: enough to keep the memory busy
// (4.51 TB/s for 800 ns are 27 KB a multiprocessor). Asking for the whole ring at once is slower.
inline constexpr int kSkinnyInFlight = 4;

struct SkinnyParams {
  CUtensorMap weight;  // boxes of a tile's rows of one panel
  CUtensorMap x;       // boxes of all rows, padded, of one panel
  const void* bias;
  void* y;
  int64_t y_stride;
  float4* parts;       // [2 * blocks, columns / 8, 128]
  uint32_t* counters;  // [blocks]
  int32_t num_rows;    // T
  int32_t num_outputs;
  int32_t num_tiles;
  int32_t num_chunks;  // of a tile
  bool gated;
  bool float_out;
};

// Chunk `unit` of all is chunk unit % num_chunks of tile unit / num_chunks. Block b has those from
// FirstUnit(b) up to the next block's.
__device__ __forceinline__ int FirstUnit(const SkinnyParams& p, int block) {
  return static_cast<int>(int64_t{p.num_tiles} * p.num_chunks * block / gridDim.x);
}
__device__ __forceinline__ int BlockOfUnit(const SkinnyParams& p, int unit) {
  const int64_t units = int64_t{p.num_tiles} * p.num_chunks;
  return static_cast<int>((int64_t{gridDim.x} * (unit + 1) - 1) / units);
}

// Stages of a chunk of W and one of x each, 8 to 11 of them. 200 KB leave room for the small
// kernels between products, which so start while one runs.
template <int kColumns>
struct SkinnyRing {
  static constexpr int kWeightPanelBytes = kWgmmaRows * kPanelRowBytes;
  static constexpr int kXPanelBytes = kColumns * kPanelRowBytes;
  static constexpr int kWeightBytes = kSkinnyPanels * kWeightPanelBytes;
  static constexpr int kXBytes = kSkinnyPanels * kXPanelBytes;
  static constexpr int kStages = 200 * 1024 / (kWeightBytes + kXBytes);
  static constexpr int kBytes = kStages * (kWeightBytes + kXBytes);
  static_assert(kStages > kSkinnyInFlight);

  uint8_t* stages;
  uint64_t* weight_full;
  uint64_t* x_full;
  uint64_t* empty;  // every consumer warp is done

  __device__ uint8_t* Weight(int stage) const { return stages + stage * (kWeightBytes + kXBytes); }
  __device__ uint8_t* X(int stage) const { return Weight(stage) + kWeightBytes; }
};

// All sides go through the stages in the same order.
template <int kColumns>
struct SkinnyStage {
  int stage = 0;
  int phase = 0;

  __device__ __forceinline__ void Advance() {
    if (++stage == SkinnyRing<kColumns>::kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// ---- Producers ----------------------------------------------------------------------------------

// Goes through the chunks of a block.
struct SkinnyChunk {
  int tile, chunk;

  __device__ SkinnyChunk(const SkinnyParams& p, int unit)
      : tile(unit / p.num_chunks), chunk(unit - tile * p.num_chunks) {}
  __device__ __forceinline__ void Advance(const SkinnyParams& p) {
    if (++chunk == p.num_chunks) {
      chunk = 0;
      ++tile;
    }
  }
};

// A chunk of W. Gated, groups of 8 gate rows and of their 8 up rows take turns, so that a thread
// gets both of an output.
__device__ __forceinline__ void CopyWeight(const SkinnyParams& p, uint32_t to,
                                           const SkinnyChunk& at, uint64_t* barrier,
                                           uint64_t policy) {
#pragma unroll
  for (int panel = 0; panel < kSkinnyPanels; ++panel) {
    const int col = (at.chunk * kSkinnyPanels + panel) * kPanelColumns;
    if (p.gated) {
      CopyBox(to, &p.weight, col, 0, 0, at.tile * (kWgmmaRows / 16), barrier, policy);
    } else {
      CopyBox(to, &p.weight, col, at.tile * kWgmmaRows, barrier, policy);
    }
    to += kWgmmaRows * kPanelRowBytes;
  }
}

// One thread. A copy waits for the landing of that kSkinnyInFlight before it.
template <int kColumns>
__device__ inline void ProduceWeights(const SkinnyParams& p, const SkinnyRing<kColumns>& ring,
                                      int begin, int end) {
  PrefetchTensorMap(&p.weight);
  const uint64_t policy = EvictFirstPolicy();
  SkinnyStage<kColumns> at, landing;
  SkinnyChunk chunk(p, begin);
  for (int unit = begin; unit < end; ++unit) {
    if (unit - begin >= kSkinnyInFlight) {
      Wait(ring.weight_full + landing.stage, landing.phase);
      landing.Advance();
    }
    Wait(ring.empty + at.stage, at.phase ^ 1);
    uint64_t* const full = ring.weight_full + at.stage;
    ArriveExpecting(full, ring.kWeightBytes);
    CopyWeight(p, SharedAddress(ring.Weight(at.stage)), chunk, full, policy);
    chunk.Advance(p);
    at.Advance();
  }
}

// One thread.
template <int kColumns>
__device__ inline void ProduceX(const SkinnyParams& p, const SkinnyRing<kColumns>& ring, int begin,
                                int end) {
  PrefetchTensorMap(&p.x);
  const uint64_t policy = EvictLastPolicy();
  SkinnyStage<kColumns> at;
  SkinnyChunk chunk(p, begin);
  WaitForPredecessor();
  for (int unit = begin; unit < end; ++unit) {
    Wait(ring.empty + at.stage, at.phase ^ 1);
    uint64_t* const full = ring.x_full + at.stage;
    ArriveExpecting(full, ring.kXBytes);
#pragma unroll
    for (int panel = 0; panel < kSkinnyPanels; ++panel) {
      CopyBox(SharedAddress(ring.X(at.stage) + panel * ring.kXPanelBytes), &p.x,
              (chunk.chunk * kSkinnyPanels + panel) * kPanelColumns, 0, full, policy);
    }
    chunk.Advance(p);
    at.Advance();
  }
}

// ---- Consumers: all of one warpgroup ------------------------------------------------------------

template <int kColumns>
using SkinnySums = float[kColumns / 8][4];

__device__ __forceinline__ bool IsFirstOfWarp() { return threadIdx.x % 32 == 0; }
// Not the producers.
__device__ __forceinline__ void MeetConsumers() {
  asm volatile("bar.sync 1, %0;" ::"n"(kSkinnyConsumers) : "memory");
}

// The tile's rows times `count` chunks, as they come.
template <typename T, int kColumns>
__device__ inline void MultiplyChunks(const SkinnyRing<kColumns>& ring, int count,
                                      SkinnyStage<kColumns>& at, SkinnySums<kColumns>& sums) {
  int before = 0;
  for (int chunk = 0; chunk < count; ++chunk) {
    Wait(ring.weight_full + at.stage, at.phase);
    Wait(ring.x_full + at.stage, at.phase);
    uint32_t weight = SharedAddress(ring.Weight(at.stage)), x = SharedAddress(ring.X(at.stage));
    WgmmaFence();
#pragma unroll
    for (int panel = 0; panel < kSkinnyPanels; ++panel) {
#pragma unroll
      for (int k = 0; k < kPanelColumns / kWgmmaColumns; ++k) {
        constexpr uint32_t kGroupBytes = 8 * kPanelRowBytes;
        Wgmma<T, kColumns>::MultiplyRows(
            sums, PanelDescriptor(weight + k * kWgmmaColumns * 2, kGroupBytes, 16),
            PanelDescriptor(x + k * kWgmmaColumns * 2, kGroupBytes, 16),
            chunk > 0 || panel > 0 || k > 0);
      }
      weight += ring.kWeightPanelBytes;
      x += ring.kXPanelBytes;
    }
    WgmmaCommit();
    // The chunk before is done.
    WgmmaWait<1>();
    if (chunk > 0 && IsFirstOfWarp()) Arrive(ring.empty + before);
    before = at.stage;
    at.Advance();
  }
  WgmmaWait<0>();
  if (IsFirstOfWarp()) Arrive(ring.empty + before);
}

// Adds 1 behind all writes of the threads that have met, and gives what was there, before all
// reads of the threads that meet next.
__device__ __forceinline__ uint32_t CountAtomically(uint32_t* counter) {
  uint32_t before;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;"
               : "=r"(before)
               : "l"(counter)
               : "memory");
  return before;
}

// The tile's chunks are shared by several blocks: leaves this block's sums for the last to come;
// true, with all sums added, for that one. The block in which the tile begins has a second place,
// for it may share the tile before, too; and it alone begins this one, so that the tile's counter
// is its.
template <int kColumns>
__device__ inline bool AddParts(const SkinnyParams& p, int tile, uint32_t* count_before,
                                SkinnySums<kColumns>& sums) {
  constexpr int kVectors = kColumns / 8;
  const int first_block = BlockOfUnit(p, tile * p.num_chunks);
  const int num_blocks = BlockOfUnit(p, (tile + 1) * p.num_chunks - 1) - first_block + 1;
  const auto part = [&](int block) {
    const int place = 2 * block + (block == first_block ? 1 : 0);
    return p.parts + place * kVectors * kSkinnyConsumers + threadIdx.x;
  };
  float4* const mine = part(static_cast<int>(blockIdx.x));
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    __stcg(mine + j * kSkinnyConsumers,
           make_float4(sums[j][0], sums[j][1], sums[j][2], sums[j][3]));
  }
  uint32_t* const counter = p.counters + first_block;
  MeetConsumers();
  if (threadIdx.x == 0) *count_before = CountAtomically(counter);
  MeetConsumers();
  if (*count_before + 1 < static_cast<uint32_t>(num_blocks)) return false;
  if (threadIdx.x == 0) *counter = 0;  // for the next product
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[j][i] = 0;
  }
#pragma unroll(kColumns <= 16 ? 4 : 2)
  for (int block = 0; block < num_blocks; ++block) {
    const float4* const from = part(first_block + block);
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const float4 added = __ldcg(from + j * kSkinnyConsumers);
      sums[j][0] += added.x;
      sums[j][1] += added.y;
      sums[j][2] += added.z;
      sums[j][3] += added.w;
    }
  }
  return true;
}

template <typename Out>
__device__ __forceinline__ float BiasOf(const SkinnyParams& p, int output) {
  return p.bias == nullptr ? 0.0f : Widen(static_cast<const Out*>(p.bias)[output]);
}

template <typename Out, int kColumns>
__device__ inline void StoreSums(const SkinnyParams& p, int tile,
                                 const SkinnySums<kColumns>& sums) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int first = tile * kWgmmaRows + warp * 16 + lane / 4, column = lane % 4 * 2;
  Out* const y = static_cast<Out*>(p.y);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int output = first + half * 8;
    if (output >= p.num_outputs) continue;
    const float bias = BiasOf<Out>(p, output);
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int t = j * 8 + column + i;
        if (t < p.num_rows) y[t * p.y_stride + output] = Narrow<Out>(sums[j][half * 2 + i] + bias);
      }
    }
  }
}

template <typename Out, int kColumns>
__device__ inline void StoreGated(const SkinnyParams& p, int tile,
                                  const SkinnySums<kColumns>& sums) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int output = tile * (kWgmmaRows / 2) + warp * 8 + lane / 4, column = lane % 4 * 2;
  if (output >= p.num_outputs) return;
  const float gate_bias = BiasOf<Out>(p, output);
  const float up_bias = BiasOf<Out>(p, p.num_outputs + output);
  Out* const y = static_cast<Out*>(p.y);
#pragma unroll
  for (int j = 0; j < kColumns / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int t = j * 8 + column + i;
      const float gate = sums[j][i] + gate_bias, up = sums[j][2 + i] + up_bias;
      if (t < p.num_rows) {
        y[t * p.y_stride + output] = Narrow<Out>(gate / (1.0f + expf(-gate)) * up);
      }
    }
  }
}

template <typename T, int kColumns>
__device__ inline void Consume(const SkinnyParams& p, const SkinnyRing<kColumns>& ring,
                               uint32_t* count_before, int begin, int end) {
  SkinnyStage<kColumns> at;
  WaitForPredecessor();  // before writes: others may still read y and the parts
  for (int unit = begin; unit < end;) {
    const int tile = unit / p.num_chunks;
    const int count = min(p.num_chunks - unit % p.num_chunks, end - unit);
    SkinnySums<kColumns> sums = {};
    MultiplyChunks<T, kColumns>(ring, count, at, sums);
    unit += count;
    if (count < p.num_chunks && !AddParts<kColumns>(p, tile, count_before, sums)) continue;
    if (p.gated) {
      StoreGated<T, kColumns>(p, tile, sums);
    } else if (p.float_out) {
      StoreSums<float, kColumns>(p, tile, sums);
    } else {
      StoreSums<T, kColumns>(p, tile, sums);
    }
  }
}

template <typename T, int kColumns>
__global__ void __launch_bounds__(kSkinnyThreads, 1)
    SkinnyKernel(const __grid_constant__ SkinnyParams p) {
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr int kStages = SkinnyRing<kColumns>::kStages;
  extern __shared__ __align__(1024) uint8_t dynamic[];
  __shared__ uint64_t weight_full[kStages], x_full[kStages], empty[kStages];
  __shared__ uint32_t count_before;
  LetSuccessorStart();
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      InitBarrier(weight_full + stage, 1);
      InitBarrier(x_full + stage, 1);
      InitBarrier(empty + stage, kSkinnyConsumers / 32);
    }
    PublishBarriers();
  }
  __syncthreads();
  const SkinnyRing<kColumns> ring = {dynamic, weight_full, x_full, empty};
  const int begin = FirstUnit(p, static_cast<int>(blockIdx.x));
  const int end = FirstUnit(p, static_cast<int>(blockIdx.x) + 1);
  if (threadIdx.x < kSkinnyConsumers) {
    Consume<T, kColumns>(p, ring, &count_before, begin, end);
  } else if (threadIdx.x == kSkinnyConsumers) {
    ProduceWeights<kColumns>(p, ring, begin, end);
  } else if (threadIdx.x == kSkinnyConsumers + 32) {
    ProduceX<kColumns>(p, ring, begin, end);
  }
#endif
}

}  // namespace lockstep
