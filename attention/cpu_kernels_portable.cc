#define LOCKSTEP_KERNEL_WIDTH 4
#define LOCKSTEP_KERNEL_COLUMNS 2
#include "attention/cpu_kernels_impl.h"

namespace lockstep {

const CpuKernels kCpuKernelsPortable = {.name = "portable",
                                        .attend_key_tile = AttendKeyTile,
                                        .fold = Fold,
                                        .normalize = Normalize,
                                        .exp_nonpositive = ExpArray};

}  // namespace lockstep
