#pragma once

#include "model/checkpoint/checkpoint.h"

namespace lockstep {

// Whether the checkpoint holds every tensor the decoder needs, in the config's shape and in a type
// that Read converts. NotFound or InvalidArgument name the first tensor that is not so. Tensors
// nobody needs are ignored (and logged at level debug).
absl::Status ValidateTensors(const ModelConfig& config, const Checkpoint& checkpoint);

}  // namespace lockstep
