#include "model/attention_selection.h"

#include <algorithm>

namespace lockstep {

absl::StatusOr<BackendSelection> SelectAttention(const ModelConfig& config, DType kv_dtype,
                                                 int64_t block_size, std::string_view user_choice,
                                                 ThreadPool& threads) {
  AttentionRequirements requirements;
  requirements.kv_dtype = kv_dtype;
  requirements.head_dim = config.head_dim;
  requirements.block_size = block_size;
  requirements.sliding_window =
      std::any_of(config.layer_windows.begin(), config.layer_windows.end(),
                  [](int64_t window) { return window > 0; });
  requirements.deterministic = true;
  return SelectBackend(requirements, user_choice, threads);
}

}  // namespace lockstep
