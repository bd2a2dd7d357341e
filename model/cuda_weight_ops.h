// What weights need on their way to a GPU: numbers made there, and other types made of them there.
#pragma once

#include <cstdint>

#include "model/checkpoint/checkpoint.h"
#include "runtime/core/buffer.h"
#include "runtime/core/cuda_device.h"
#include "runtime/core/range.h"
#include "runtime/core/status.h"

namespace lockstep {

// out[r, c] = element (rows.begin + r, cols.begin + c) of a made-up tensor: the bits that
// Checkpoint::Read gives on the host. out: any dtype, device memory without gaps. Launches on
// `stream`.
absl::Status MakeUpWeights(const MadeUpTensor& tensor, Range rows, Range cols,
                           const MatrixView& out, CudaStream stream);

// to[i] = from[i], nearest-even, as Convert on the host does (a NaN stays one). Device memory,
// [count]; they may not overlap. Launches on `stream`.
absl::Status ConvertOnCuda(DType from_type, const void* from, DType to_type, void* to,
                           int64_t count, CudaStream stream);

}  // namespace lockstep
