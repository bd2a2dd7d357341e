#include "launch/bench/result_file.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <utility>

namespace lockstep {

namespace {

std::string Reason(const std::string& path, int error) {
  return absl::StrFormat("cannot write %s: %s", path, std::strerror(error));
}

}  // namespace

absl::StatusOr<ResultFile> ResultFile::Create(const std::string& path) {
  namespace fs = std::filesystem;
  std::error_code error;
  fs::path target = fs::weakly_canonical(path, error);
  if (error) return absl::InvalidArgumentError(Reason(path, error.value()));
  const fs::file_status status = fs::status(target, error);
  if (fs::exists(status) && !fs::is_regular_file(status)) {
    return absl::InvalidArgumentError("cannot write " + path + ": it is no regular file");
  }
  if (target.filename().empty()) return absl::InvalidArgumentError(Reason(path, EISDIR));
  // The name itself, too, must be one that a file can have.
  if (target.filename().string().size() > NAME_MAX) {
    return absl::InvalidArgumentError(Reason(path, ENAMETOOLONG));
  }
  std::string unfinished = (target.parent_path() / ".lockstep-result-XXXXXX").string();
  const int fd = mkstemp(unfinished.data());
  if (fd < 0) return absl::InvalidArgumentError(Reason(path, errno));
  const mode_t mask = umask(0);
  umask(mask);
  fchmod(fd, 0666 & ~mask);  // mkstemp's is for its owner alone
  return ResultFile(target.string(), std::move(unfinished), fd);
}

ResultFile::ResultFile(ResultFile&& other) noexcept
    : path_(std::move(other.path_)), unfinished_(std::move(other.unfinished_)), fd_(other.fd_) {
  other.unfinished_.clear();
  other.fd_ = -1;
}

ResultFile::~ResultFile() {
  if (fd_ >= 0) close(fd_);
  if (!unfinished_.empty()) unlink(unfinished_.c_str());
}

absl::Status ResultFile::Write(const std::string& text) {
  size_t done = 0;
  while (done < text.size()) {
    const ssize_t count = write(fd_, text.data() + done, text.size() - done);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return absl::InternalError(Reason(path_, errno));
    done += static_cast<size_t>(count);
  }
  const int fd = std::exchange(fd_, -1);
  if (close(fd) != 0 || std::rename(unfinished_.c_str(), path_.c_str()) != 0) {
    return absl::InternalError(Reason(path_, errno));
  }
  unfinished_.clear();
  return absl::OkStatus();
}

}  // namespace lockstep
