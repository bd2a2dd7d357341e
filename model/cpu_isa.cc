#include "model/cpu_isa.h"

namespace lockstep {

std::string_view Name(CpuIsa isa) {
  switch (isa) {
    case CpuIsa::kPortable:
      return "portable";
    case CpuIsa::kAvx2:
      return "avx2";
    case CpuIsa::kAvx512:
      return "avx512";
    case CpuIsa::kAvx512Bf16:
      return "avx512_bf16";
  }
  return "";
}

// The compiler's support library asks CPUID and whether the operating system saves the registers.
std::vector<CpuIsa> SupportedCpuIsas() {
  std::vector<CpuIsa> isas = {CpuIsa::kPortable};
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return isas;
  isas.push_back(CpuIsa::kAvx2);
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512vl")) {
    return isas;
  }
  isas.push_back(CpuIsa::kAvx512);
  if (__builtin_cpu_supports("avx512bf16")) isas.push_back(CpuIsa::kAvx512Bf16);
  return isas;
}

CpuIsa BestCpuIsa() {
  static const CpuIsa best = SupportedCpuIsas().back();
  return best;
}

}  // namespace lockstep
