#include "model/attention_selection.h"

#include <algorithm>

namespace lockstep {

AttentionRequirements RequirementsOf(const ModelConfig& config, const std::string& device,
                                     DType dtype, DType kv_dtype, int64_t block_size) {
  AttentionRequirements requirements;
  requirements.device = device;
  if (device != "cpu") requirements.activation_dtype = dtype;
  requirements.kv_dtype = kv_dtype;
  requirements.head_dim = config.head_dim;
  requirements.block_size = block_size;
  requirements.sliding_window =
      std::any_of(config.layer_windows.begin(), config.layer_windows.end(),
                  [](int64_t window) { return window > 0; });
  requirements.deterministic = true;
  return requirements;
}

absl::StatusOr<BackendSelection> SelectAttention(const ModelConfig& config, DType kv_dtype,
                                                 int64_t block_size, std::string_view user_choice,
                                                 ThreadPool& threads) {
  return SelectBackend(RequirementsOf(config, "cpu", DType::kF32, kv_dtype, block_size),
                       user_choice, threads);
}

}  // namespace lockstep
