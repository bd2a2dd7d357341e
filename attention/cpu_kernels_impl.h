// Source of the CPU attention kernels. Included by cpu_kernels_<set>.cc, each compiled for its
// instruction set, which defines LOCKSTEP_KERNEL_WIDTH (float lanes of a vector: 4, 8, 16) and
// LOCKSTEP_KERNEL_COLUMNS (vectors in a row of a register tile).
//
// Everything is in an unnamed namespace, and no inline function of another header is called: a copy
// compiled for AVX-512 must not become everybody's. Compiled with -ffp-contract=off: a product and
// a sum are fused where Fma says so and nowhere else, because two register tiles that hold the same
// row must give it the same bits.
#pragma once

#include <cstdint>

#include "attention/cpu_kernels.h"
#include "attention/cpu_vector.h"

namespace lockstep {
namespace {

// A register tile is kRows query rows x kColumns vectors. 32 registers (AVX-512): 6 x 4 sums, 4 for
// the shared operand, 1 broadcast; 16 registers: 6 x 2 sums, 2 and 1.
constexpr int kRows = 6;
constexpr int kColumns = LOCKSTEP_KERNEL_COLUMNS;

// ---- Keys, transposed, and values, as float32 -------------------------------------------------

// Whole register blocks of kWidth keys x some dims of one group of keys; returns the dims done.
template <typename T>
inline int64_t TransposeBlocks(const T* const (&rows)[kWidth], int64_t head_dim, float* packed) {
  int64_t d = 0;
  for (; d + kWidth <= head_dim; d += kWidth) {
    Vec block[kWidth];
#pragma GCC unroll 16
    for (int i = 0; i < kWidth; ++i) block[i] = LoadAsFloat(rows[i] + d);
    Transpose(block);
#pragma GCC unroll 16
    for (int i = 0; i < kWidth; ++i) Store(packed + (d + i) * kKeyStrip, block[i]);
  }
  return d;
}

// A bfloat16 is the upper half of a float, so pairs travel as 32-bit words and part at the end:
// half the shuffles.
inline int64_t TransposeBlocks(const BF16* const (&rows)[kWidth], int64_t head_dim, float* packed) {
  int64_t d = 0;
  for (; d + 2 * kWidth <= head_dim; d += 2 * kWidth) {
    UintVec block[kWidth];
#pragma GCC unroll 16
    for (int i = 0; i < kWidth; ++i) {
      block[i] = *reinterpret_cast<const UnalignedUintVec*>(rows[i] + d);
    }
    Transpose(block);
#pragma GCC unroll 16
    for (int i = 0; i < kWidth; ++i) {
      float* const out = packed + (d + 2 * i) * kKeyStrip;
      Store(out, reinterpret_cast<Vec>(block[i] << 16));
      Store(out + kKeyStrip, reinterpret_cast<Vec>(block[i] & 0xffff0000u));
    }
  }
  return d;
}

// A vector of the next tile of this thread. Pages of a request lie anywhere, and a head's part of a
// page is a few KB: too short for the processor to see a stream. Always inlined, because gcc 12
// takes a function that does nothing but prefetch for one without effect, and drops the call.
template <typename T>
__attribute__((always_inline)) inline void PrefetchNext(const KeyTileTask& task, const T* data,
                                                        int64_t key) {
  if (key < task.next_begin || key >= task.next_end) return;
  const T* const row = data + task.next_offsets[key];
  constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(T));
  for (int64_t d = 0; d < task.head_dim; d += kLine) __builtin_prefetch(row + d, 0, 2);
}

// packed[d][k] = key of position `strip + k` in the tile, for whole groups of kWidth keys that
// touch [key_begin, key_end). Positions outside repeat a neighbour: their logits are not used.
template <typename T>
void PackKeys(const KeyTileTask& task, int64_t strip, int64_t first, int64_t last) {
  const T* const keys = static_cast<const T*>(task.keys);
  for (int64_t group = first; group < last; group += kWidth) {
    const T* rows[kWidth];
    for (int i = 0; i < kWidth; ++i) {
      int64_t key = group + i;
      if (key < task.key_begin) key = task.key_begin;
      if (key >= task.key_end) key = task.key_end - 1;
      rows[i] = keys + task.offsets[key];
      PrefetchNext(task, keys, group + i);
    }
    float* const packed = task.packed_keys + (group - strip);
    for (int64_t d = TransposeBlocks(rows, task.head_dim, packed); d < task.head_dim; ++d) {
      for (int i = 0; i < kWidth; ++i) packed[d * kKeyStrip + i] = ScalarToFloat(rows[i][d]);
    }
  }
}

// unpacked[k][d] = value of position `strip + k`, for positions [first, last).
template <typename T>
void UnpackValues(const KeyTileTask& task, int64_t strip, int64_t first, int64_t last) {
  const T* const values = static_cast<const T*>(task.values);
  for (int64_t key = first; key < last; ++key) {
    const T* const row = values + task.offsets[key];
    PrefetchNext(task, values, key);
    float* const out = task.unpacked_values + (key - strip) * task.padded_dim;
    int64_t d = 0;
    for (; d + kWidth <= task.head_dim; d += kWidth) Store(out + d, LoadAsFloat(row + d));
    for (; d < task.head_dim; ++d) out[d] = ScalarToFloat(row[d]);
    for (; d < task.padded_dim; ++d) out[d] = 0;
  }
}

// ---- Products -----------------------------------------------------------------------------------

// A product of `rows` rows: c[r][n] += sum over k of a[r][k] * b[k][n], k ascending, one Fma each:
// an element's bits do not depend on the register tile it is computed in.
struct Operands {
  const float* a;
  int64_t a_stride;
  const float* b;
  int64_t b_stride;
  int64_t depth;
  float* c;
  int64_t c_stride;
};

template <int R, int N>
inline void MultiplyTile(const Operands& o, int64_t column) {
  Vec sums[R][N];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) sums[r][n] = Load(o.c + r * o.c_stride + column + n * kWidth);
  }
  for (int64_t k = 0; k < o.depth; ++k) {
    Vec b[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) b[n] = Load(o.b + k * o.b_stride + column + n * kWidth);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Vec a = Broadcast(o.a[r * o.a_stride + k]);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) sums[r][n] = Fma(a, b[n], sums[r][n]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) Store(o.c + r * o.c_stride + column + n * kWidth, sums[r][n]);
  }
}

template <int R>
void MultiplyRows(const Operands& o, int64_t columns) {
  int64_t column = 0;
  for (; column + kColumns * kWidth <= columns; column += kColumns * kWidth) {
    MultiplyTile<R, kColumns>(o, column);
  }
  for (; column < columns; column += kWidth) MultiplyTile<R, 1>(o, column);
}

// `columns` is a multiple of kWidth; rows in [1, kRows].
void Multiply(const Operands& o, int64_t rows, int64_t columns) {
  switch (rows) {
    case 1:
      return MultiplyRows<1>(o, columns);
    case 2:
      return MultiplyRows<2>(o, columns);
    case 3:
      return MultiplyRows<3>(o, columns);
    case 4:
      return MultiplyRows<4>(o, columns);
    case 5:
      return MultiplyRows<5>(o, columns);
    default:
      return MultiplyRows<6>(o, columns);
  }
}

// Rows of a register tile: 7 rows go as 4 and 3, not as 6 and a slow single one.
inline int64_t RowsAtOnce(int64_t rows) {
  const int64_t tiles = (rows + kRows - 1) / kRows;
  return (rows + tiles - 1) / tiles;
}

// ---- exp and the softmax of a row ---------------------------------------------------------------

// exp(x) = 2^n * exp(r), n = round(x / ln 2), |r| <= ln(2) / 2, exp(r) by a polynomial of degree 7
// (Taylor's: the term left out is below 6e-9). ln 2 is split in two (Cody and Waite) so that
// n * kLn2High is exact.
inline Vec ExpNonpositive(Vec x) {
  constexpr float kLowest = -87.33f;  // exp is a normal number from here on
  constexpr float kLog2E = 1.44269504f;
  constexpr float kLn2High = 0.693359375f;
  constexpr float kLn2Low = -2.12194440e-4f;
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves round(x) in the low bits
  constexpr int32_t kRoundBits = 0x4b400000;
  const Vec clamped = x < kLowest ? Broadcast(kLowest) : x;
  const Vec shifted = Fma(clamped, Broadcast(kLog2E), Broadcast(kRound));
  const Vec n = shifted - kRound;
  Vec r = Fma(n, Broadcast(-kLn2High), clamped);
  r = Fma(n, Broadcast(-kLn2Low), r);
  Vec p = Broadcast(1.0f / 5040);
  p = Fma(p, r, Broadcast(1.0f / 720));
  p = Fma(p, r, Broadcast(1.0f / 120));
  p = Fma(p, r, Broadcast(1.0f / 24));
  p = Fma(p, r, Broadcast(1.0f / 6));
  p = Fma(p, r, Broadcast(0.5f));
  p = Fma(p, r, Broadcast(1.0f));
  p = Fma(p, r, Broadcast(1.0f));
  const IntVec exponent = (reinterpret_cast<IntVec>(shifted) - kRoundBits + 127) << 23;
  const Vec value = p * reinterpret_cast<Vec>(exponent);
  return x < kLowest ? Broadcast(0.0f) : value;
}

// c * tanh(x / c), with tanh(y) = sign(y) (1 - e) / (1 + e), e = exp(-2 |y|): absolute error below
// 3e-7 c.
inline Vec SoftCap(Vec x, float cap) {
  const Vec y = x / cap;
  const Vec magnitude = y < 0.0f ? -y : y;
  const Vec e = ExpNonpositive(magnitude * -2.0f);
  const Vec tanh = (1.0f - e) / (1.0f + e);
  return (y < 0.0f ? -tanh : tanh) * cap;
}

// Lanes are added in a fixed tree.
inline float SumLanes(Vec v) {
  float lanes[kWidth];
  Store(lanes, v);
  for (int half = kWidth / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

inline float MaxLanes(Vec v) {
  float result = v[0];
  for (int i = 1; i < kWidth; ++i) result = v[i] > result ? v[i] : result;
  return result;
}

// logits [kKeyTile] of a row become p = exp(logit - max) in [begin, end). A key's lane is its
// position modulo kWidth and vectors are added in ascending order; lanes outside [begin, end) add
// an exact zero, so the sum does not depend on what others in the row tile see.
void SoftmaxRow(float* logits, int64_t begin, int64_t end, float softcap, float* max, float* sum) {
  const int64_t first = begin / kWidth * kWidth;
  const int64_t last = (end + kWidth - 1) / kWidth * kWidth;
  if (softcap != 0) {
    for (int64_t k = first; k < last; k += kWidth)
      Store(logits + k, SoftCap(Load(logits + k), softcap));
  }
  for (int64_t k = first; k < begin; ++k) logits[k] = -__builtin_inff();
  for (int64_t k = end; k < last; ++k) logits[k] = -__builtin_inff();
  Vec largest = Load(logits + first);
  for (int64_t k = first + kWidth; k < last; k += kWidth) {
    const Vec x = Load(logits + k);
    largest = x > largest ? x : largest;
  }
  *max = MaxLanes(largest);
  Vec total = {};
  for (int64_t k = first; k < last; k += kWidth) {
    const Vec p = ExpNonpositive(Load(logits + k) - *max);
    Store(logits + k, p);
    total += p;
  }
  *sum = SumLanes(total);
}

// ---- One key tile -------------------------------------------------------------------------------

template <typename T>
void ComputeLogits(const KeyTileTask& task, int64_t strip, int64_t begin, int64_t end) {
  const int64_t first = begin / kWidth * kWidth;
  const int64_t last = (end + kWidth - 1) / kWidth * kWidth;
  PackKeys<T>(task, strip, first, last);
  const int64_t step = RowsAtOnce(task.num_rows);
  for (int64_t row = 0; row < task.num_rows; row += step) {
    const int64_t rows = task.num_rows - row < step ? task.num_rows - row : step;
    float* const logits = task.logits + row * kKeyTile + first;
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t k = 0; k < last - first; k += kWidth) Store(logits + r * kKeyTile + k, Vec{});
    }
    Multiply({.a = task.query + row * task.head_dim,
              .a_stride = task.head_dim,
              .b = task.packed_keys + (first - strip),
              .b_stride = kKeyStrip,
              .depth = task.head_dim,
              .c = logits,
              .c_stride = kKeyTile},
             rows, last - first);
  }
}

// acc[row] += sum over keys [begin, end) of p * v, for `rows` rows.
inline void AddValues(const KeyTileTask& task, int64_t strip, int64_t row, int64_t rows,
                      int64_t begin, int64_t end, float* acc) {
  if (begin >= end) return;
  Multiply({.a = task.logits + row * kKeyTile + begin,
            .a_stride = kKeyTile,
            .b = task.unpacked_values + (begin - strip) * task.padded_dim,
            .b_stride = task.padded_dim,
            .depth = end - begin,
            .c = acc + row * task.padded_dim,
            .c_stride = task.padded_dim},
           rows, task.padded_dim);
}

// Rows of a register tile may see different keys. What all see is done together, the rest row by
// row before and after it, so each row adds exactly its visible keys, ascending: a value no row
// should see is never multiplied, not even by zero (it may be NaN).
template <typename T>
void AccumulateValues(const KeyTileTask& task, int64_t strip, int64_t begin, int64_t end,
                      float* acc) {
  UnpackValues<T>(task, strip, begin, end);
  const int64_t step = RowsAtOnce(task.num_rows);
  for (int64_t row = 0; row < task.num_rows; row += step) {
    const int64_t rows = task.num_rows - row < step ? task.num_rows - row : step;
    int64_t low[kRows];
    int64_t high[kRows];
    int64_t common_begin = begin;
    int64_t common_end = end;
    for (int64_t r = 0; r < rows; ++r) {
      low[r] = task.visible_begin[row + r] > begin ? task.visible_begin[row + r] : begin;
      high[r] = task.visible_end[row + r] < end ? task.visible_end[row + r] : end;
      if (low[r] > common_begin) common_begin = low[r];
      if (high[r] < common_end) common_end = high[r];
    }
    if (common_begin >= common_end) {
      for (int64_t r = 0; r < rows; ++r) AddValues(task, strip, row + r, 1, low[r], high[r], acc);
      continue;
    }
    for (int64_t r = 0; r < rows; ++r) {
      AddValues(task, strip, row + r, 1, low[r], common_begin, acc);
    }
    AddValues(task, strip, row, rows, common_begin, common_end, acc);
    for (int64_t r = 0; r < rows; ++r) AddValues(task, strip, row + r, 1, common_end, high[r], acc);
  }
}

// Asks for the vectors of positions [begin, end) of this tile: what PrefetchNext of the tile before
// has not asked for.
template <typename T>
void Prefetch(const KeyTileTask& task, const void* data, int64_t begin, int64_t end) {
  constexpr int64_t kCacheLine = 64;
  const int64_t bytes = task.head_dim * static_cast<int64_t>(sizeof(T));
  for (int64_t key = begin; key < end; ++key) {
    const char* const row =
        reinterpret_cast<const char*>(static_cast<const T*>(data) + task.offsets[key]);
    for (int64_t byte = 0; byte < bytes; byte += kCacheLine) __builtin_prefetch(row + byte);
  }
}

// fn(strip, begin, end) for each strip of the tile and the keys [begin, end) of it in use.
template <typename Fn>
inline void ForEachStrip(const KeyTileTask& task, Fn fn) {
  int64_t strip = task.key_begin / kKeyStrip * kKeyStrip;
  for (; strip < task.key_end; strip += kKeyStrip) {
    const int64_t end = strip + kKeyStrip;
    fn(strip, strip > task.key_begin ? strip : task.key_begin,
       end < task.key_end ? end : task.key_end);
  }
}

template <typename T>
void AttendKeyTileOf(const KeyTileTask& task, const SoftmaxState& partial) {
  ForEachStrip(task, [&](int64_t strip, int64_t begin, int64_t end) {
    const int64_t next_end = end + kKeyStrip < task.key_end ? end + kKeyStrip : task.key_end;
    Prefetch<T>(task, task.keys, end, next_end);
    Prefetch<T>(task, task.values, begin, end);
    ComputeLogits<T>(task, strip, begin, end);
  });
  for (int64_t row = 0; row < task.num_rows; ++row) {
    partial.max[row] = -__builtin_inff();
    partial.sum[row] = 0;
    if (task.visible_begin[row] < task.visible_end[row]) {
      SoftmaxRow(task.logits + row * kKeyTile, task.visible_begin[row], task.visible_end[row],
                 task.logit_softcap, partial.max + row, partial.sum + row);
    }
    float* const acc = partial.acc + row * task.padded_dim;
    for (int64_t d = 0; d < task.padded_dim; d += kWidth) Store(acc + d, Vec{});
  }
  ForEachStrip(task, [&](int64_t strip, int64_t begin, int64_t end) {
    AccumulateValues<T>(task, strip, begin, end, partial.acc);
  });
}

void AttendKeyTile(const KeyTileTask& task, const SoftmaxState& partial) {
  switch (task.dtype) {
    case DType::kF32:
      return AttendKeyTileOf<float>(task, partial);
    case DType::kF16:
      return AttendKeyTileOf<F16>(task, partial);
    case DType::kBF16:
      return AttendKeyTileOf<BF16>(task, partial);
    case DType::kF8E4M3:  // not among the backend's capabilities
      __builtin_trap();
  }
}

// ---- Between key tiles --------------------------------------------------------------------------

void Fold(int64_t num_rows, int64_t padded_dim, const SoftmaxState& partial,
          const SoftmaxState& state) {
  for (int64_t row = 0; row < num_rows; ++row) {
    if (partial.sum[row] == 0) continue;
    float* const acc = state.acc + row * padded_dim;
    const float* const added = partial.acc + row * padded_dim;
    if (state.sum[row] == 0) {
      state.max[row] = partial.max[row];
      state.sum[row] = partial.sum[row];
      for (int64_t d = 0; d < padded_dim; d += kWidth) Store(acc + d, Load(added + d));
      continue;
    }
    const float max = state.max[row] > partial.max[row] ? state.max[row] : partial.max[row];
    const Vec weight = ExpNonpositive(Broadcast(state.max[row] - max));
    const Vec added_weight = ExpNonpositive(Broadcast(partial.max[row] - max));
    state.max[row] = max;
    state.sum[row] = state.sum[row] * weight[0] + partial.sum[row] * added_weight[0];
    for (int64_t d = 0; d < padded_dim; d += kWidth) {
      Store(acc + d, Fma(Load(acc + d), weight, Load(added + d) * added_weight));
    }
  }
}

void Normalize(const float* acc, float sum, int64_t head_dim, float* out) {
  const float inverse = 1.0f / sum;
  for (int64_t d = 0; d < head_dim; ++d) out[d] = acc[d] * inverse;
}

void ExpArray(const float* x, int64_t count, float* y) {
  for (int64_t i = 0; i < count; i += kWidth) {
    Vec v = {};
    const int64_t lanes = count - i < kWidth ? count - i : kWidth;
    for (int64_t j = 0; j < lanes; ++j) v[j] = x[i + j];
    v = ExpNonpositive(v);
    for (int64_t j = 0; j < lanes; ++j) y[i + j] = v[j];
  }
}

}  // namespace

}  // namespace lockstep
