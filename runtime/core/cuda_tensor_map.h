// Descriptors of arrays in device memory from which the copy engine brings boxes to shared memory
// (PTX ISA, "Tensors"; cp.async.bulk.tensor). For files that see CUDA's headers.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <vector>

#include "runtime/core/dtype.h"
#include "runtime/core/status.h"

namespace lockstep {

// One dimension, the innermost first.
struct TensorMapDim {
  int64_t size = 0;          // elements; what a box has beyond them arrives as zeros
  int64_t stride_bytes = 0;  // of no matter for the innermost, whose elements follow each other
  int box = 1;               // elements of a box, at most 256
};

// How the 16-byte pieces of a box lie in shared memory.
enum class TensorMapSwizzle {
  kNone,
  k128Bytes,  // innermost box of 128 bytes, which are permuted by the number of their row mod 8
};

// Up to 5 dimensions. The data and all strides must be multiples of 16 bytes. Needs the driver, but
// no memory and no stream: microseconds of the host's time. A kernel takes the map by value, as a
// __grid_constant__ parameter. Internal with the driver's text when it refuses.
absl::StatusOr<CUtensorMap> EncodeTensorMap(const void* data, DType dtype,
                                            const std::vector<TensorMapDim>& dims,
                                            TensorMapSwizzle swizzle);

}  // namespace lockstep
