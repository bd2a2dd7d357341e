// stdout, which carries results only.
#pragma once

#include <string_view>

#include "runtime/core/status.h"

namespace lockstep {

// Writes to a file descriptor at once, without a buffer. SIGPIPE must be ignored (main does that).
class ResultWriter {
 public:
  explicit ResultWriter(int fd = 1) : fd_(fd) {}

  // False when nothing more can be written, now or earlier.
  bool Write(std::string_view bytes);

  // Why nothing more can be written. OK when all is well, and also when the reader has gone
  // (`lockstep ... | head`): then nobody wants the rest.
  const absl::Status& status() const { return status_; }

 private:
  int fd_;
  bool closed_ = false;
  absl::Status status_;
};

// Prints `text` on stdout. Exit status: 0, or 1 after saying what went wrong.
int PrintResult(std::string_view text);

}  // namespace lockstep
