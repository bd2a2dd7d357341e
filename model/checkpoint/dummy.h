// Weights of `--load-format dummy`: made up, but the same at every TP size.
#pragma once

#include <memory>
#include <string>

#include "model/checkpoint/checkpoint.h"

namespace lockstep {

// Every tensor the decoder needs. An element depends on its tensor's name, row and column alone (a
// counter-based generator): uniform with mean 0 and standard deviation 0.02; norm weights are 1.
std::unique_ptr<Checkpoint> MakeDummyCheckpoint(const std::string& path, const ModelConfig& config);

}  // namespace lockstep
