#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace lockstep {

// Instruction sets that Linear has kernels for, in rising order.
enum class CpuIsa { kPortable, kAvx2, kAvx512, kAvx512Bf16 };

// "portable", "avx2", "avx512", "avx512_bf16".
std::string_view Name(CpuIsa isa);

// Those this CPU (and its operating system) runs, in rising order; kPortable always.
std::vector<CpuIsa> SupportedCpuIsas();
CpuIsa BestCpuIsa();

}  // namespace lockstep
