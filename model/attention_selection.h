// Which attention backend runs a model's layers, and its check at run time.
//
// The engine knows attention through this header: backends as SelectAttention gives them, and
// CheckedBackend to put around one.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "attention/checked_backend.h"
#include "attention/selector.h"
#include "model/model_config.h"

namespace lockstep {

// What every layer of the model needs of a backend on `device` ("cpu" or "cuda"). On the CPU
// activations are float32, on CUDA of `dtype`.
AttentionRequirements RequirementsOf(const ModelConfig& config, const std::string& device,
                                     DType dtype, DType kv_dtype, int64_t block_size);

// Asks the selector for a CPU backend that does what every layer of the model needs, with results
// that do not depend on the batch: a request's ids may not depend on its neighbours. `user_choice`
// may be empty. Errors are SelectBackend's. `threads` must outlive the backend.
absl::StatusOr<BackendSelection> SelectAttention(const ModelConfig& config, DType kv_dtype,
                                                 int64_t block_size, std::string_view user_choice,
                                                 ThreadPool& threads);

}  // namespace lockstep
