#include "runtime/core/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace lockstep {

namespace {

absl::Status FileError(const std::string& path, int error) {
  const std::string message = absl::StrFormat("%s: %s", path, std::strerror(error));
  if (error == ENOENT || error == ENOTDIR) return absl::NotFoundError(message);
  return absl::FailedPreconditionError(message);
}

absl::StatusOr<std::string> ReadAll(int fd, const std::string& path) {
  std::string text;
  char chunk[1 << 16];
  while (static_cast<int64_t>(text.size()) <= kMaxReadFileBytes) {
    const ssize_t n = read(fd, chunk, sizeof chunk);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return FileError(path, errno);
    if (n == 0) return text;
    text.append(chunk, static_cast<size_t>(n));
  }
  return absl::FailedPreconditionError(
      absl::StrFormat("%s: larger than the %d bytes accepted here", path, kMaxReadFileBytes));
}

}  // namespace

absl::StatusOr<std::string> ReadFile(const std::string& path, FileKind kind) {
  // Before opening: opening a FIFO waits for its writer.
  struct stat info;
  if (stat(path.c_str(), &info) != 0) return FileError(path, errno);
  if (S_ISDIR(info.st_mode)) return FileError(path, EISDIR);
  if (kind == FileKind::kRegular && !S_ISREG(info.st_mode)) {
    return absl::FailedPreconditionError(path + ": is not a regular file");
  }
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return FileError(path, errno);
  absl::StatusOr<std::string> text = ReadAll(fd, path);
  close(fd);
  return text;
}

}  // namespace lockstep
