#include "model/kv_scales.h"

#include <cmath>
#include <utility>

#include "model/checkpoint/tensor_names.h"
#include "runtime/core/status.h"

namespace lockstep {

namespace {

absl::Status ReadScale(const Checkpoint& checkpoint, int64_t layer, const std::string& name,
                       float* scale, int64_t* num_read) {
  for (const char* const owner : {"self_attn.", "self_attn.attn."}) {
    const std::string tensor = LayerTensor(layer, owner + name);
    const TensorInfo* const info = checkpoint.Find(tensor);
    if (info == nullptr) continue;
    if (info->rows() != 1 || info->cols() != 1) {
      return absl::InvalidArgumentError(
          absl::StrFormat("%s: %s has %d x %d elements, not the one of a scale of the KV cache",
                          checkpoint.description(), tensor, info->rows(), info->cols()));
    }
    LOCKSTEP_RETURN_IF_ERROR(
        checkpoint.Read(tensor, {0, 1}, {0, 1}, {scale, DType::kF32, 1, 1, 1}));
    if (!(*scale > 0) || !std::isfinite(*scale)) {
      return absl::InvalidArgumentError(
          absl::StrFormat("%s: %s is %g: a scale of the KV cache is positive and finite",
                          checkpoint.description(), tensor, *scale));
    }
    ++*num_read;
    return absl::OkStatus();
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<KvScales> ReadKvScales(const Checkpoint& checkpoint, int64_t num_layers) {
  KvScales scales;
  scales.keys.assign(static_cast<size_t>(num_layers), 1);
  scales.values.assign(static_cast<size_t>(num_layers), 1);
  for (int64_t layer = 0; layer < num_layers; ++layer) {
    LOCKSTEP_RETURN_IF_ERROR(
        ReadScale(checkpoint, layer, "k_scale", &scales.keys[layer], &scales.num_read));
    LOCKSTEP_RETURN_IF_ERROR(
        ReadScale(checkpoint, layer, "v_scale", &scales.values[layer], &scales.num_read));
  }
  return scales;
}

std::string KvScales::ToString() const {
  const int64_t total = 2 * std::ssize(keys);
  if (num_read == 0) return "fp8 KV cache: scales are 1, the checkpoint has none";
  if (num_read == total) return "fp8 KV cache: scales of all layers from the checkpoint";
  return absl::StrFormat("fp8 KV cache: %d of %d scales from the checkpoint, the others are 1",
                         num_read, total);
}

void KvScales::ApplyTo(KvPool& pool) const {
  for (int64_t layer = 0; layer < std::ssize(keys); ++layer) {
    pool.SetScales(layer, keys[layer], values[layer]);
  }
}

}  // namespace lockstep
