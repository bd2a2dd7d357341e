// The inner loops of the CPU attention backend, compiled once for each instruction set from
// cpu_kernels_impl.h and chosen at run time.
//
// Plain data and function pointers only: the translation units of wider instruction sets must not
// emit inline functions that the linker could pick for everybody.
#pragma once

#include <cstdint>

#include "runtime/core/dtype.h"

namespace lockstep {

// Keys at positions [kKeyTile * j, kKeyTile * (j + 1)) of a request are one key tile: the unit of
// the softmax's partial results, whatever the batch.
inline constexpr int64_t kKeyTile = 256;
// Keys unpacked to float32 at a time: 64 keys of head_dim 64 are 16 KB, which stays in L1.
inline constexpr int64_t kKeyStrip = 64;
// Rows of accumulators and unpacked values are padded to whole vectors of the widest set.
inline constexpr int64_t kRowPadding = 16;

// Attention of `num_rows` query rows over one key tile of one KV head.
struct KeyTileTask {
  const void* keys;    // of the layer, `dtype`
  const void* values;  // of the layer, `dtype`
  DType dtype;
  int64_t head_dim;        // D
  int64_t padded_dim;      // D rounded up to kRowPadding
  const int64_t* offsets;  // [kKeyTile] element offset of the D-vector of each key; set in
                           // [key_begin, key_end) only
  int64_t key_begin;       // union of what the rows see, within the tile
  int64_t key_end;
  // Of the tile that this thread works on next, asked for while this one is computed: element
  // offsets set in [next_begin, next_end); empty: none.
  const int64_t* next_offsets;  // [kKeyTile]
  int64_t next_begin;
  int64_t next_end;
  int64_t num_rows;
  const float* query;            // [num_rows, D], already times scale
  const int32_t* visible_begin;  // [num_rows] keys a row sees: [begin, end) within the tile, empty
  const int32_t* visible_end;    // when begin >= end
  float logit_softcap;           // 0: none
  float* logits;                 // scratch [num_rows, kKeyTile]
  float* packed_keys;            // scratch [D, kKeyStrip]
  float* unpacked_values;        // scratch [kKeyStrip, padded_dim]
};

// What a softmax over some of the keys leaves: with m the largest logit, p_k = exp(logit_k - m),
// sum = sum of p_k and acc = sum of p_k * v_k. A row that saw no key has sum 0.
struct SoftmaxState {
  float* max;  // [rows]
  float* sum;  // [rows]
  float* acc;  // [rows, padded_dim]
};

struct CpuKernels {
  const char* name;
  // Overwrites `partial`.
  void (*attend_key_tile)(const KeyTileTask& task, const SoftmaxState& partial);
  // state = state followed by partial. Rows whose partial saw no key stay as they are.
  void (*fold)(int64_t num_rows, int64_t padded_dim, const SoftmaxState& partial,
               const SoftmaxState& state);
  // out[d] = acc[d] / sum of one row.
  void (*normalize)(const float* acc, float sum, int64_t head_dim, float* out);
  // y = exp(x) for x <= 0; relative error below 2e-7 (kExpRelativeError), exp(0) = 1 exactly,
  // exact zero below -87.33 (exp is subnormal from there on). NaN stays NaN.
  void (*exp_nonpositive)(const float* x, int64_t count, float* y);
};

inline constexpr float kExpRelativeError = 2e-7f;

// The best the processor can run comes first; the portable one is always there and last.
struct CpuKernelList {
  const CpuKernels* const* begin;
  int64_t size;
};
CpuKernelList UsableCpuKernels();

extern const CpuKernels kCpuKernelsPortable;
extern const CpuKernels kCpuKernelsAvx2;
extern const CpuKernels kCpuKernelsAvx512;

}  // namespace lockstep
