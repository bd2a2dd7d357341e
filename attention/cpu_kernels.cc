#include "attention/cpu_kernels.h"

#include <array>

namespace lockstep {

CpuKernelList UsableCpuKernels() {
  struct Usable {
    std::array<const CpuKernels*, 3> kernels;
    int64_t size = 0;
  };
  static const Usable usable = [] {
    Usable list;
#if defined(LOCKSTEP_X86_KERNELS)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
      list.kernels[list.size++] = &kCpuKernelsAvx512;
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
        __builtin_cpu_supports("f16c")) {
      list.kernels[list.size++] = &kCpuKernelsAvx2;
    }
#endif
    list.kernels[list.size++] = &kCpuKernelsPortable;
    return list;
  }();
  return {usable.kernels.data(), usable.size};
}

}  // namespace lockstep
