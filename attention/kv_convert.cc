#include "attention/kv_convert.h"

namespace lockstep {

void ToCache(const float* from, float scale, DType dtype, void* to, int64_t count) {
  if (scale == 1) return Convert(DType::kF32, from, dtype, to, count);
  for (int64_t i = 0; i < count; ++i) {
    const float scaled = from[i] / scale;
    Convert(DType::kF32, &scaled, dtype, static_cast<char*>(to) + i * SizeOf(dtype), 1);
  }
}

void FromCache(const void* from, float scale, DType dtype, float* to, int64_t count) {
  Convert(dtype, from, DType::kF32, to, count);
  for (int64_t i = 0; i < count; ++i) to[i] *= scale;
}

}  // namespace lockstep
