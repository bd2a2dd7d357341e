#define LOCKSTEP_KERNEL_WIDTH 16
#define LOCKSTEP_KERNEL_COLUMNS 4
#include "attention/cpu_kernels_impl.h"

namespace lockstep {

const CpuKernels kCpuKernelsAvx512 = {.name = "avx512",
                                      .attend_key_tile = AttendKeyTile,
                                      .fold = Fold,
                                      .normalize = Normalize,
                                      .exp_nonpositive = ExpArray};

}  // namespace lockstep
