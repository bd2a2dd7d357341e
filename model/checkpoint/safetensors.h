// Reader of safetensors files: 8 bytes little-endian header length, a JSON header that gives each
// tensor's dtype, shape and byte span, then the data (github.com/huggingface/safetensors,
// "Format").
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "model/checkpoint/checkpoint.h"

namespace lockstep {

// The weights of one or more files that together hold each tensor once. Every header is checked in
// full: InvalidArgument, naming file and tensor, for lengths, spans, shapes or types that do not
// add up to exactly the file.
absl::StatusOr<std::unique_ptr<Checkpoint>> OpenSafetensors(const std::vector<std::string>& paths);

// model.safetensors of `folder`, or the shards model.safetensors.index.json names. NotFound, saying
// what was looked for and what is there instead, when there is neither.
absl::StatusOr<std::unique_ptr<Checkpoint>> OpenSafetensorsFolder(const std::string& folder);

}  // namespace lockstep
