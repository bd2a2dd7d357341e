#include "runtime/core/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace lockstep {

absl::StatusOr<std::string> ReadFile(const std::string& path, int64_t max_bytes) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) {
    const std::string message = absl::StrFormat("%s: %s", path, std::strerror(errno));
    if (errno == ENOENT || errno == ENOTDIR) return absl::NotFoundError(message);
    return absl::FailedPreconditionError(message);
  }
  std::string text;
  char chunk[1 << 16];
  ssize_t n = 0;
  while ((n = read(fd, chunk, sizeof chunk)) > 0) {
    text.append(chunk, static_cast<size_t>(n));
    if (static_cast<int64_t>(text.size()) > max_bytes) break;
  }
  const int error = errno;
  close(fd);
  if (n < 0)
    return absl::FailedPreconditionError(absl::StrFormat("%s: %s", path, std::strerror(error)));
  if (static_cast<int64_t>(text.size()) > max_bytes) {
    return absl::FailedPreconditionError(
        absl::StrFormat("%s: larger than the %d bytes accepted here", path, max_bytes));
  }
  return text;
}

}  // namespace lockstep
