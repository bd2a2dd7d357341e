// Products of one row with weights that stream through shared memory without a pause, from one
// product to the next: device code of the kernel that makes a whole decode step (cuda_row_step.h).
//
// Every block owns a contiguous share of each product's outputs. One thread, the producer, pulls
// the share's rows of W through a ring of slots with bulk copies; weights never change, so it waits
// for nobody but the consumers, and the next product's weights are on their way while this one's x
// is not known yet. 15 warps consume: `column_warps` share the columns, each lane with 8 of every
// 256 ("chunk") of its warp's in registers, times `row_warps` that share a stage's rows. The warps'
// parts of a sum meet in shared memory, some tens of rows at a time, in two buffers by turns.
#pragma once

#include "attention/cuda_row_attention.cuh"
#include "model/cuda_kernel.cuh"
#include "runtime/core/cuda_async_copy.cuh"

namespace lockstep {

inline constexpr int kRowChunkCols = 256;
// Chunks that a warp takes at once: a stage is so many a warp, of several rows or of one. With
// less, the latency of a stage's steps (wait, load, multiply, add over the warp) is longer than its
// copy.
inline constexpr int kRowStageChunks = 4;
inline constexpr int kRowSlotBytes = kRowStageChunks * kRowWarps * kRowChunkCols * 2;
inline constexpr int kMaxRowSlots = 8;
// Rows of W whose parts are collected before they are added up.
inline constexpr int kRowGroup = 64;
inline constexpr int kRowPartStride = kRowWarps + 2;  // odd: rows behind each other, other banks

// How warps and stages share a product [outputs * rows_per_output, K].
//
// One or two chunks a warp: a stage is `stage_rows` whole rows, or the gate rows of some outputs,
// then their up rows. More chunks: rows go in pairs, of two outputs that follow each other or of a
// gate and its up, and a stage is two chunks a warp of both.
struct RowProduct {
  int k;
  int outputs;
  int rows_per_output;  // 2: weight is [gate; up], each `outputs` rows
  int chunks;           // of a warp
  int column_warps;
  int row_warps;
  int stage_rows;
  // What the first blocks of the grid, which attend, have less of than the others, in 16ths of
  // those's.
  int lighter_by;

  // The block's share; `attending` blocks have attention, too.
  __device__ int first_output(int attending) const { return OutputsBefore(blockIdx.x, attending); }
  __device__ int end_output(int attending) const {
    return OutputsBefore(blockIdx.x + 1, attending);
  }
  __device__ int OutputsBefore(int block, int attending) const {
    const int all = static_cast<int>(gridDim.x) * 16 - attending * lighter_by;
    const int before = block * 16 - min(block, attending) * lighter_by;
    return static_cast<int>(int64_t{outputs} * before / all);
  }
  __device__ bool whole_rows() const { return chunks <= 2; }
  __device__ int stage_outputs() const { return stage_rows / rows_per_output; }
};

// Both sides go through the slots in the same order.
struct RowRing {
  char* slots;
  uint64_t* full;   // copies have landed
  uint64_t* empty;  // every consumer warp is done
  int num_slots;
  int slot = 0;
  int phase = 0;

  __device__ char* Slot() const { return slots + slot * kRowSlotBytes; }
  __device__ void Advance() {
    if (++slot == num_slots) {
      slot = 0;
      phase ^= 1;
    }
  }
};

// The producer's side. It fills all slots when nobody consumes, but has few copies on their way at
// a time: enough for the memory's latency at its full speed. More would wait in line, and
// everything else that the block asks of memory behind them: meetings and x would take as long as a
// ring of copies.
struct RowProducer {
  RowRing ring;
  int num_in_flight;  // at most
  int num_started = 0;
  RowRing landing;  // the oldest copy that may be on its way

  __device__ RowProducer(const RowRing& ring, int num_in_flight)
      : ring(ring), num_in_flight(num_in_flight), landing(ring) {}

  // The slot is free, and will be full after so many bytes.
  __device__ char* Claim(int bytes) {
    if (num_started < num_in_flight) {
      ++num_started;
    } else {
      Wait(landing.full + landing.slot, landing.phase);
      landing.Advance();
    }
    Wait(ring.empty + ring.slot, ring.phase ^ 1);
    ArriveExpecting(full(), bytes);
    return ring.Slot();
  }
  __device__ uint64_t* full() const { return ring.full + ring.slot; }
  __device__ void Advance() { ring.Advance(); }
};

// One thread: this block's rows of W.
__device__ inline void ProduceRows(RowProducer& producer, const RowProduct& p, const char* weight,
                                   int attending) {
  const int64_t row_bytes = int64_t{p.k} * 2;
  const int64_t up = p.outputs * row_bytes;
  const int end = p.end_output(attending), step = p.stage_outputs();
  for (int output = p.first_output(attending); output < end; output += step) {
    const char* from = weight + output * row_bytes;
    if (p.whole_rows()) {
      const int bytes = min(step, end - output) * static_cast<int>(row_bytes);
      char* const slot = producer.Claim(bytes * p.rows_per_output);
      CopyBytes(SharedAddress(slot), from, bytes, producer.full());
      if (p.rows_per_output == 2)
        CopyBytes(SharedAddress(slot + bytes), from + up, bytes, producer.full());
      producer.Advance();
      continue;
    }
    const int64_t other = p.rows_per_output == 2 ? up : row_bytes;
    const bool has_other = p.rows_per_output == 2 || output + 1 < end;
    const int stage_bytes = kRowStageChunks / 2 * p.column_warps * kRowChunkCols * 2;
    for (int64_t at = 0; at < row_bytes; at += stage_bytes) {
      const int bytes = static_cast<int>(min(int64_t{stage_bytes}, row_bytes - at));
      char* const slot = producer.Claim(has_other ? 2 * bytes : bytes);
      CopyBytes(SharedAddress(slot), from + at, bytes, producer.full());
      if (has_other)
        CopyBytes(SharedAddress(slot + bytes), from + other + at, bytes, producer.full());
      producer.Advance();
    }
  }
}

// A warp's place in a product.
struct RowConsumer {
  int column_warp;
  int row_warp;
  int lane;
  bool active;  // there may be more warps than places

  __device__ explicit RowConsumer(const RowProduct& p)
      : column_warp(threadIdx.x / 32 % p.column_warps),
        row_warp(threadIdx.x / 32 / p.column_warps),
        lane(threadIdx.x % 32),
        active(row_warp < p.row_warps) {}
  // First of this lane's columns in its i-th chunk.
  __device__ int Column(const RowProduct& p, int i) const {
    return (column_warp + p.column_warps * i) * kRowChunkCols + lane * 8;
  }
};

// This lane's columns of x, in 16 bits; zeros beyond K.
template <typename T, int kChunks>
struct RowX {
  Vector<T, 8> at[kChunks];
};

// Two elements, the first in the lower half.
template <typename T>
__device__ __forceinline__ float2 WidenPair(uint32_t bits);
template <>
__device__ __forceinline__ float2 WidenPair<__nv_bfloat16>(uint32_t bits) {
  return {__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u)};
}
template <>
__device__ __forceinline__ float2 WidenPair<__half>(uint32_t bits) {
  return __half22float2(*reinterpret_cast<const __half2*>(&bits));
}

// sum + two products.
template <typename T>
__device__ __forceinline__ float MultiplyPair(uint32_t w, uint32_t x, float sum) {
  const float2 a = WidenPair<T>(w), b = WidenPair<T>(x);
  return fmaf(a.y, b.y, fmaf(a.x, b.x, sum));
}
template <typename T>
__device__ __forceinline__ float MultiplyChunk(const uint4& w, const Vector<T, 8>& x, float sum) {
  const uint4& bits = *reinterpret_cast<const uint4*>(x.at);
  sum = MultiplyPair<T>(w.x, bits.x, sum);
  sum = MultiplyPair<T>(w.y, bits.y, sum);
  sum = MultiplyPair<T>(w.z, bits.z, sum);
  return MultiplyPair<T>(w.w, bits.w, sum);
}

__device__ __forceinline__ float RowWarpSum(float sum) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
  return sum;
}
// One of two values goes on, the other is added to the lanes' partners: half the lanes, half the
// shuffles.
__device__ __forceinline__ float RowFold(float first, float second, int lanes) {
  const bool upper = (threadIdx.x & lanes) != 0;
  return (upper ? second : first) + __shfl_xor_sync(~0u, upper ? first : second, lanes);
}
// Sums over the warp. Lane l has that of value RowOfLane(l).
__device__ __forceinline__ float RowWarpSums(const float (&values)[2]) {
  float sum = RowFold(values[0], values[1], 16);
#pragma unroll
  for (int lanes = 8; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
  return sum;
}
__device__ __forceinline__ float RowWarpSums(const float (&values)[4]) {
  float sum = RowFold(RowFold(values[0], values[1], 16), RowFold(values[2], values[3], 16), 8);
#pragma unroll
  for (int lanes = 4; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
  return sum;
}
template <int kRows>
__device__ __forceinline__ int RowOfLane(int lane) {
  return kRows == 4 ? lane / 8 % 2 * 2 + lane / 16 : lane / 16;
}

// Sum of the column warps' parts. All are read at once: those that are not there hold anything.
__device__ __forceinline__ float SumRowParts(const RowProduct& p, const float* parts) {
  float sum = 0;
#pragma unroll
  for (int w = 0; w < kRowWarps; ++w) {
    const float part = parts[w];
    if (w < p.column_warps) sum += part;
  }
  return sum;
}

// A stage of whole rows, some for each warp: their parts of sums, from row `first` of the group's
// buffer on.
template <typename T, int kChunks>
__device__ __forceinline__ void ConsumeStage(RowRing& ring, const RowProduct& p,
                                             const RowConsumer& me, const RowX<T, kChunks>& x,
                                             int first, float* parts) {
  constexpr int kRows = kRowStageChunks / kChunks;
  Wait(ring.full + ring.slot, ring.phase);
  if (me.active) {
    const char* const rows = ring.Slot() + me.row_warp * kRows * p.k * 2;
    uint4 w[kRows][kChunks] = {};
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const int col = me.Column(p, i);
      if (col >= p.k) continue;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        w[r][i] = *reinterpret_cast<const uint4*>(rows + (r * p.k + col) * 2);
      }
    }
    float sums[kRows] = {};
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) sums[r] = MultiplyChunk(w[r][i], x.at[i], sums[r]);
    }
    const float sum = RowWarpSums(sums);
    // Rows that a last stage does not have are those of an earlier one, and their sums go nowhere.
    if (me.lane % (32 / kRows) == 0) {
      const int row = first + me.row_warp * kRows + RowOfLane<kRows>(me.lane);
      parts[row * kRowPartStride + me.column_warp] = sum;
    }
  }
  __syncwarp();
  if (me.lane == 0) Arrive(ring.empty + ring.slot);
  ring.Advance();
}

// A pair of rows in several stages; their parts of sums to row `row` of the group's buffer, and the
// next. A second row that is not there is what stood in the slots before, and its sum goes nowhere.
template <typename T, int kChunks>
__device__ __forceinline__ void ConsumePair(RowRing& ring, const RowProduct& p,
                                            const RowConsumer& me, const RowX<T, kChunks>& x,
                                            int row, float* parts) {
  constexpr int kStage = kRowStageChunks / 2;
  const int stage_cols = kStage * p.column_warps * kRowChunkCols;
  float sums[2] = {};
#pragma unroll
  for (int begin = 0; begin < kChunks; begin += kStage) {
    Wait(ring.full + ring.slot, ring.phase);
    // The last stage may be shorter.
    const int cols = min(stage_cols, p.k - begin / kStage * stage_cols);
    uint4 w[2][kStage] = {};
#pragma unroll
    for (int i = 0; i < kStage && begin + i < kChunks; ++i) {
      const int col = (i * p.column_warps + me.column_warp) * kRowChunkCols + me.lane * 8;
      if (!me.active || col >= cols) continue;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        w[r][i] = *reinterpret_cast<const uint4*>(ring.Slot() + (r * cols + col) * 2);
      }
    }
#pragma unroll
    for (int i = 0; i < kStage && begin + i < kChunks; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) sums[r] = MultiplyChunk(w[r][i], x.at[begin + i], sums[r]);
    }
    __syncwarp();
    if (me.lane == 0) Arrive(ring.empty + ring.slot);
    ring.Advance();
  }
  const float sum = RowWarpSums(sums);
  if (me.active && me.lane % 16 == 0) {
    parts[(row + RowOfLane<2>(me.lane)) * kRowPartStride + me.column_warp] = sum;
  }
}

// All consumer threads. bias(output) is asked for while the rows are on their way, then comes
// finish(output, sum + bias.x, sum of its up row + bias.y), for each of the block's outputs. parts:
// two buffers of [kRowGroup, kRowPartStride].
template <typename T, int kChunks, typename Bias, typename Finish>
__device__ __forceinline__ void ConsumeRows(RowRing& block_ring, const RowProduct& p,
                                            const RowX<T, kChunks>& x, float* parts, int attending,
                                            Bias bias, Finish finish) {
  RowRing ring = block_ring;  // in registers
  ring.slots = AsShared(ring.slots);
  parts = AsShared(parts);
  const RowConsumer me(p);
  const int per_output = p.rows_per_output, stage_outputs = p.stage_outputs();
  const int group_outputs = kRowGroup / p.stage_rows * stage_outputs;
  const int end = p.end_output(attending), i = static_cast<int>(threadIdx.x);
  int group = 0;
  for (int output = p.first_output(attending); output < end; output += group_outputs, ++group) {
    float* const buffer = parts + group % 2 * kRowGroup * kRowPartStride;
    const int count = min(group_outputs, end - output);
    float2 added = {};
    if (i < count) added = bias(output + i);
    for (int done = 0; done < count; done += stage_outputs) {
      if constexpr (kChunks <= 2) {
        ConsumeStage(ring, p, me, x, done * per_output, buffer);
      } else {
        ConsumePair(ring, p, me, x, done * per_output, buffer);
      }
    }
    RowThreadsMeet();
    if (i >= count) continue;
    // The last stage may hold fewer outputs.
    const int begin = i / stage_outputs * stage_outputs;
    const int size = min(stage_outputs, count - begin);
    const int row = begin * per_output + i % stage_outputs;
    const float sum = SumRowParts(p, buffer + row * kRowPartStride);
    const float up =
        per_output == 2 ? SumRowParts(p, buffer + (row + size) * kRowPartStride) : 0.0f;
    finish(output + i, sum + added.x, up + added.y);
  }
  block_ring = ring;
}

}  // namespace lockstep
