// Tells how far the reading of a checkpoint has come, whatever its format.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "model/checkpoint/checkpoint.h"

namespace lockstep {

// `inner`, whose Read is cut into pieces of some megabytes; count(bytes) is called after each of
// them, on the thread that reads.
std::unique_ptr<Checkpoint> CountReadBytes(std::unique_ptr<Checkpoint> inner,
                                           std::function<void(int64_t bytes)> count);

}  // namespace lockstep
