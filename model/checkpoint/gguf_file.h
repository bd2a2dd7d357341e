// The container format GGUF, versions 2 and 3, little-endian: metadata and tensor directory
// (github.com/ggml-org/ggml, docs/gguf.md).
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "model/checkpoint/checked_file.h"
#include "model/checkpoint/gguf_types.h"
#include "runtime/core/json.h"

namespace lockstep {

struct GgufTensor {
  uint32_t type_id = 0;
  const GgufType* type = nullptr;  // nullptr: cannot be read, and its size is not known
  std::vector<int64_t> shape;      // row-major: the last dimension is contiguous
  int64_t offset = 0;              // bytes, in the file
  int64_t size_bytes = 0;          // 0 where type is nullptr
};

struct GgufFile {
  std::unique_ptr<CheckedFile> file;
  Json metadata;  // an object: strings, numbers, bools, flat arrays of them
  std::map<std::string, GgufTensor> tensors;

  // InvalidArgument, naming path and key or tensor, when counts, lengths, offsets or types do not
  // fit the file; also for versions, byte orders and split files that are not supported.
  static absl::StatusOr<GgufFile> Open(const std::string& path);
};

// Whether the file starts like a GGUF file.
bool IsGgufFile(const std::string& path);

}  // namespace lockstep
