// Reader of safetensors files: 8 bytes little-endian header length, a JSON header that gives each
// tensor's dtype, shape and byte span, then the data (github.com/huggingface/safetensors,
// "Format").
#pragma once

#include <memory>
#include <string>

#include "model/checkpoint/checkpoint.h"

namespace lockstep {

// The tensors of one file. The header is checked in full: InvalidArgument, naming file and tensor,
// for lengths, spans, shapes or types that do not add up to exactly the file.
absl::StatusOr<std::unique_ptr<Checkpoint>> OpenSafetensors(const std::string& path);

// model.safetensors of `folder`, or the shards that model.safetensors.index.json names, which
// together hold each tensor once. NotFound, saying what was looked for and what is there instead,
// when there is neither.
absl::StatusOr<std::unique_ptr<Checkpoint>> OpenSafetensorsFolder(const std::string& folder);

}  // namespace lockstep
