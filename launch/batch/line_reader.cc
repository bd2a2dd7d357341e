#include "launch/batch/line_reader.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

namespace lockstep {

namespace {

constexpr size_t kBufferBytes = 256 << 10;
constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";

}  // namespace

LineReader::LineReader(int fd, std::string name, int64_t max_line_bytes, int wake_fd)
    : fd_(fd),
      name_(std::move(name)),
      max_line_bytes_(max_line_bytes),
      wake_fd_(wake_fd),
      buffer_(kBufferBytes, '\0') {}

absl::Status LineReader::Fill() {
  begin_ = end_ = 0;
  while (!at_end_) {
    pollfd fds[] = {{.fd = fd_, .events = POLLIN, .revents = 0},
                    {.fd = wake_fd_, .events = POLLIN, .revents = 0}};
    if (poll(fds, 2, -1) > 0 && fds[1].revents != 0) {
      at_end_ = true;
      break;
    }
    const ssize_t got = ::read(fd_, buffer_.data(), buffer_.size());
    if (got >= 0) {
      end_ = static_cast<size_t>(got);
      at_end_ = got == 0;
      break;
    }
    if (errno != EINTR && errno != EAGAIN) {
      return absl::FailedPreconditionError(
          absl::StrFormat("reading %s: %s", name_, std::strerror(errno)));
    }
  }
  return absl::OkStatus();
}

void LineReader::Append(std::string_view piece, InputLine* line) const {
  const size_t room = static_cast<size_t>(max_line_bytes_) - line->text.size();
  line->too_long = line->too_long || piece.size() > room;
  line->text.append(piece.substr(0, room));
}

absl::StatusOr<bool> LineReader::Next(InputLine* line) {
  *line = InputLine();
  line->number = number_ + 1;
  bool has_line = false;
  while (true) {
    if (begin_ == end_) {
      LOCKSTEP_RETURN_IF_ERROR(Fill());
      if (begin_ == end_) break;
    }
    has_line = true;
    const std::string_view rest(buffer_.data() + begin_, end_ - begin_);
    const size_t length = rest.find('\n');
    Append(rest.substr(0, length), line);
    line->has_end = length != std::string_view::npos;
    const size_t taken = line->has_end ? length + 1 : rest.size();
    begin_ += taken;
    line->num_bytes += static_cast<int64_t>(taken);
    if (line->has_end) break;
  }
  if (!has_line) return false;
  ++number_;
  if (!line->too_long && line->text.ends_with('\r')) line->text.pop_back();
  if (number_ == 1 && line->text.starts_with(kByteOrderMark)) {
    line->text.erase(0, kByteOrderMark.size());
  }
  return true;
}

bool IsBlankLine(std::string_view text) {
  return text.find_first_not_of(" \t\r\v\f") == std::string_view::npos;
}

}  // namespace lockstep
