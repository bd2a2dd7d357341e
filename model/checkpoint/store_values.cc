#include "model/checkpoint/store_values.h"

#include <cmath>

namespace lockstep {

namespace {

template <typename T>
bool FitsF16(const T* values, int64_t count) {
  constexpr float kMaxF16 = 65504.0f;
  bool fits = true;
  for (int64_t i = 0; i < count; ++i) {
    const float magnitude = std::fabs(ToFloat(values[i]));
    fits &= !(magnitude > kMaxF16 && magnitude < HUGE_VALF);
  }
  return fits;
}

}  // namespace

bool StoreValues(DType from, const void* src, DType to, void* dst, int64_t count) {
  if (to == DType::kF16 && from == DType::kF32 && !FitsF16(static_cast<const float*>(src), count)) {
    return false;
  }
  if (to == DType::kF16 && from == DType::kBF16 && !FitsF16(static_cast<const BF16*>(src), count)) {
    return false;
  }
  Convert(from, src, to, dst, count);
  return true;
}

}  // namespace lockstep
