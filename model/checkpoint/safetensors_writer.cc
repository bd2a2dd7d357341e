#include "model/checkpoint/safetensors_writer.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "runtime/core/json.h"

namespace lockstep {

absl::StatusOr<std::unique_ptr<SafetensorsWriter>> SafetensorsWriter::Create(
    const std::string& path, const std::string& name, int64_t rows, int64_t cols) {
  LOCKSTEP_CHECK(rows >= 0 && cols > 0);
  struct stat info;
  // A rename would replace a device (/dev/null) by a file.
  if (stat(path.c_str(), &info) == 0 && !S_ISREG(info.st_mode)) {
    return absl::InvalidArgumentError(path + ": is not a regular file: cannot write there");
  }
  const std::string temporary = absl::StrFormat("%s.%d.tmp", path, getpid());
  const int fd = open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (fd < 0) {
    return absl::FailedPreconditionError(
        absl::StrFormat("%s: cannot be written: %s", temporary, std::strerror(errno)));
  }
  std::unique_ptr<SafetensorsWriter> writer(
      new SafetensorsWriter(path, temporary, fd, cols, rows * cols));
  Json entry = {{"dtype", "F32"},
                {"shape", {rows, cols}},
                {"data_offsets", {int64_t{0}, rows * cols * int64_t{4}}}};
  std::string header = DumpJson(Json{{name, std::move(entry)}});
  header.append((8 - header.size() % 8) % 8, ' ');  // the data starts aligned
  std::string length(8, '\0');
  for (int i = 0; i < 8; ++i) length[i] = static_cast<char>(header.size() >> (8 * i) & 0xff);
  LOCKSTEP_RETURN_IF_ERROR(writer->Write(length.data(), length.size()));
  LOCKSTEP_RETURN_IF_ERROR(writer->Write(header.data(), header.size()));
  return writer;
}

SafetensorsWriter::~SafetensorsWriter() {
  if (fd_ >= 0) close(fd_);
  if (!temporary_.empty()) unlink(temporary_.c_str());
}

absl::Status SafetensorsWriter::Write(const void* data, int64_t size) {
  const auto* bytes = static_cast<const char*>(data);
  while (size > 0) {
    const ssize_t n = write(fd_, bytes, size);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) {
      return absl::FailedPreconditionError(
          absl::StrFormat("%s: writing failed: %s", temporary_, std::strerror(errno)));
    }
    bytes += n;
    size -= n;
  }
  return absl::OkStatus();
}

absl::Status SafetensorsWriter::Append(std::span<const float> values) {
  const auto count = static_cast<int64_t>(values.size());
  LOCKSTEP_CHECK(fd_ >= 0 && count % cols_ == 0 && count <= missing_values_);
  LOCKSTEP_RETURN_IF_ERROR(Write(values.data(), count * 4));
  missing_values_ -= count;
  return absl::OkStatus();
}

absl::Status SafetensorsWriter::Finish() {
  if (missing_values_ != 0) {
    return absl::InternalError(
        absl::StrFormat("%s: %d rows were never written", path_, missing_values_ / cols_));
  }
  const int fd = fd_;
  fd_ = -1;
  if (close(fd) != 0 || std::rename(temporary_.c_str(), path_.c_str()) != 0) {
    return absl::FailedPreconditionError(
        absl::StrFormat("%s: cannot be written: %s", path_, std::strerror(errno)));
  }
  temporary_.clear();
  return absl::OkStatus();
}

}  // namespace lockstep
