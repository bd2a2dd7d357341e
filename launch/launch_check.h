// Launch mistakes, told before anything is loaded: what all ranks must have alike is compared with
// rank 0's, word by word.
#pragma once

#include "launch/engine_flags.h"
#include "model/checkpoint/checkpoint.h"
#include "parallel/communicator.h"

namespace lockstep {

// COLLECTIVE. The bytes of the program, the command, and the engine's options as they were given;
// not MODEL, which each host may keep in a place of its own. The same status on all ranks:
// FailedPrecondition names the lowest rank that differs, its host, what differs, and both values.
absl::Status CheckSameLaunch(const EngineFlags& flags, Communicator& communicator);

// COLLECTIVE. The same for the opened model: the fields of its configuration, of every tensor type,
// shape and place in its file, and of a few tensors one row of values. So checkpoints of one shape
// (another training of it) are told apart without being read, unless they differ in other rows
// alone. Reads one row of at most kSampledTensors tensors.
absl::Status CheckSameModel(const ModelSource& source, Communicator& communicator);

inline constexpr size_t kSampledTensors = 16;

}  // namespace lockstep
