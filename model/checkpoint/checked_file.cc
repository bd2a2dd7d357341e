#include "model/checkpoint/checked_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string_view>
#include <vector>

namespace lockstep {

namespace {

constexpr int64_t kChunkBytes = int64_t{4} << 20;  // one read; large enough to hide its cost
constexpr std::string_view kLfsStart = "version https://git-lfs";

}  // namespace

absl::Status CheckPath(const std::string& path) {
  struct stat info;
  if (stat(path.c_str(), &info) == 0) return absl::OkStatus();
  const int error = errno;
  const std::string message = absl::StrFormat("%s: %s", path, std::strerror(error));
  if (error != ENOENT && error != ENOTDIR) return absl::FailedPreconditionError(message);
  if (lstat(path.c_str(), &info) != 0) return absl::NotFoundError(message);
  return absl::FailedPreconditionError(
      path + ": is a dangling link: the file or folder that it leads to is not there");
}

absl::StatusOr<std::unique_ptr<CheckedFile>> CheckedFile::Open(const std::string& path) {
  LOCKSTEP_RETURN_IF_ERROR(CheckPath(path));
  struct stat info;
  // Before open(): opening a named pipe would wait for a writer.
  if (stat(path.c_str(), &info) != 0) {
    return absl::FailedPreconditionError(absl::StrFormat("%s: %s", path, std::strerror(errno)));
  }
  if (S_ISDIR(info.st_mode)) {
    return absl::InvalidArgumentError(path + ": is a folder, expected a weight file");
  }
  if (!S_ISREG(info.st_mode)) {
    return absl::InvalidArgumentError(path + ": is not a regular file");
  }
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) {
    return absl::FailedPreconditionError(absl::StrFormat("%s: %s", path, std::strerror(errno)));
  }
  std::unique_ptr<CheckedFile> file(new CheckedFile(path, fd, info.st_size));
  if (info.st_size == 0) return absl::InvalidArgumentError(path + ": the file is empty");
  std::string start(std::min<int64_t>(info.st_size, kLfsStart.size()), '\0');
  LOCKSTEP_RETURN_IF_ERROR(file->ReadAt(0, start.size(), start.data()));
  if (start == kLfsStart) {
    return absl::InvalidArgumentError(
        path +
        ": is a Git LFS pointer, not the weights themselves; run `git lfs pull` in its "
        "repository or download the file");
  }
  return file;
}

CheckedFile::~CheckedFile() { close(fd_); }

absl::Status CheckedFile::ReadAt(int64_t offset, int64_t size, void* dst) const {
  auto* out = static_cast<char*>(dst);
  while (size > 0) {
    const ssize_t n = pread(fd_, out, std::min<int64_t>(size, int64_t{1} << 30), offset);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) {
      return absl::FailedPreconditionError(
          absl::StrFormat("%s: reading at byte %d: %s", path_, offset, std::strerror(errno)));
    }
    if (n == 0) {
      return absl::FailedPreconditionError(absl::StrFormat(
          "%s: no byte %d: the file had %d bytes when it was opened and is shorter now", path_,
          offset, size_bytes_));
    }
    out += n;
    offset += n;
    size -= n;
  }
  return absl::OkStatus();
}

absl::Status CheckedFile::ReadRows(
    int64_t offset, int64_t row_bytes, Range rows, Range columns,
    const std::function<absl::Status(int64_t row, const uint8_t* bytes)>& fn) const {
  const int64_t width = columns.size();
  if (rows.size() <= 0 || width <= 0) return absl::OkStatus();
  // Whole rows lie together; parts of rows are a read each.
  const int64_t rows_a_read =
      width == row_bytes ? std::clamp<int64_t>(kChunkBytes / row_bytes, 1, rows.size()) : 1;
  std::vector<uint8_t> chunk((rows_a_read - 1) * row_bytes + width);
  for (int64_t first = rows.begin; first < rows.end; first += rows_a_read) {
    const int64_t count = std::min(rows_a_read, rows.end - first);
    LOCKSTEP_RETURN_IF_ERROR(ReadAt(offset + first * row_bytes + columns.begin,
                                    (count - 1) * row_bytes + width, chunk.data()));
    for (int64_t i = 0; i < count; ++i) {
      LOCKSTEP_RETURN_IF_ERROR(fn(first + i, chunk.data() + i * row_bytes));
    }
  }
  return absl::OkStatus();
}

}  // namespace lockstep
