// A weight file opened for reading: every read is checked, so a file cut short after it was opened
// is an error and not a signal (nothing is mapped).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "runtime/core/range.h"
#include "runtime/core/status.h"

namespace lockstep {

// Whether `path` leads to something. NotFound only when there is nothing of that name at all;
// FailedPrecondition, with the path and the reason, for a symbolic link to nothing, a loop of links
// or a folder on the way that may not be searched: what is there but broken is never "not there".
absl::Status CheckPath(const std::string& path);

// Immutable; reads may run on several threads at once.
class CheckedFile {
 public:
  // NotFound when there is no such file. InvalidArgument, with the path and the reason, for a
  // folder, an empty file and a Git LFS pointer. FailedPrecondition when it cannot be opened.
  static absl::StatusOr<std::unique_ptr<CheckedFile>> Open(const std::string& path);

  ~CheckedFile();
  CheckedFile(const CheckedFile&) = delete;
  CheckedFile& operator=(const CheckedFile&) = delete;

  const std::string& path() const { return path_; }
  int64_t size_bytes() const { return size_bytes_; }

  // Exactly [offset, offset + size) into dst; FailedPrecondition naming the path otherwise.
  absl::Status ReadAt(int64_t offset, int64_t size, void* dst) const;

  // A rectangle of bytes of a row-major matrix that starts at `offset` and whose rows are
  // `row_bytes` long: calls fn(row, bytes of `columns` in that row) for each of `rows`, in order.
  // Only the rectangle is read. `bytes` is valid during the call; the first error of fn ends the
  // walk.
  absl::Status ReadRows(
      int64_t offset, int64_t row_bytes, Range rows, Range columns,
      const std::function<absl::Status(int64_t row, const uint8_t* bytes)>& fn) const;

 private:
  CheckedFile(std::string path, int fd, int64_t size_bytes)
      : path_(std::move(path)), fd_(fd), size_bytes_(size_bytes) {}

  std::string path_;
  int fd_;
  int64_t size_bytes_;
};

}  // namespace lockstep
