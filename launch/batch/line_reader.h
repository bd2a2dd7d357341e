// Lines of a file or a pipe, one at a time: memory does not depend on how many there are, nor on
// how long one is.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "runtime/core/status.h"

namespace lockstep {

struct InputLine {
  int64_t number = 0;  // from 1
  // Without its end (LF or CRLF) and, of the first line, without a byte order mark.
  std::string text;
  // More than max_line_bytes long: `text` is the beginning.
  bool too_long = false;
  int64_t num_bytes = 0;  // all of it, its end included
  bool has_end = false;   // false: the input's last line, without LF
};

// Not thread-safe, but for what writes to `wake_fd`.
class LineReader {
 public:
  // `fd` stays the caller's. `name` is for messages. Waiting for a pipe ends, as the end of the
  // input does, when `wake_fd` is readable; -1: nothing wakes it.
  LineReader(int fd, std::string name, int64_t max_line_bytes, int wake_fd = -1);

  // False at the end. FailedPrecondition when reading fails.
  absl::StatusOr<bool> Next(InputLine* line);

 private:
  absl::Status Fill();
  void Append(std::string_view piece, InputLine* line) const;

  const int fd_;
  const std::string name_;
  const int64_t max_line_bytes_;
  const int wake_fd_;
  std::string buffer_;
  size_t begin_ = 0;
  size_t end_ = 0;
  bool at_end_ = false;
  int64_t number_ = 0;
};

// Only blanks, tabs and the like: a line that asks for nothing.
bool IsBlankLine(std::string_view text);

}  // namespace lockstep
