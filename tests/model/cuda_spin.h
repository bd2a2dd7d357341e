// Makes a stream late.
#pragma once

#include <cstdint>

#include "runtime/core/cuda_device.h"
#include "runtime/core/status.h"

namespace lockstep {

// One thread that does nothing for so long.
absl::Status SpinOnDevice(int64_t nanoseconds, CudaStream stream);

}  // namespace lockstep
