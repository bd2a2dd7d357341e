// Writes one float32 matrix as a safetensors file, a few rows at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "runtime/core/status.h"

namespace lockstep {

// The file appears under its name only once it is whole: rows go to a temporary file beside it,
// which Finish renames and the destructor otherwise removes. Not thread-safe.
class SafetensorsWriter {
 public:
  // A file with one tensor `name`, F32 [rows, cols]. InvalidArgument when `path` is something other
  // than a regular file; FailedPrecondition, with path and reason, when it cannot be written.
  static absl::StatusOr<std::unique_ptr<SafetensorsWriter>> Create(const std::string& path,
                                                                   const std::string& name,
                                                                   int64_t rows, int64_t cols);
  ~SafetensorsWriter();
  SafetensorsWriter(const SafetensorsWriter&) = delete;
  SafetensorsWriter& operator=(const SafetensorsWriter&) = delete;

  // Appends whole rows: values.size() is a multiple of cols. A failed write (a full disk) says so.
  absl::Status Append(std::span<const float> values);

  // Gives the file its name. Internal when rows are missing.
  absl::Status Finish();

 private:
  SafetensorsWriter(std::string path, std::string temporary, int fd, int64_t cols, int64_t values)
      : path_(std::move(path)),
        temporary_(std::move(temporary)),
        fd_(fd),
        cols_(cols),
        missing_values_(values) {}
  absl::Status Write(const void* data, int64_t size);

  std::string path_;
  std::string temporary_;
  int fd_;
  int64_t cols_;
  int64_t missing_values_;
};

}  // namespace lockstep
