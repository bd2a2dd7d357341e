#include "launch/result_writer.h"

#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "runtime/core/log.h"

namespace lockstep {

bool ResultWriter::Write(std::string_view bytes) {
  while (!closed_ && !bytes.empty()) {
    const ssize_t written = ::write(fd_, bytes.data(), bytes.size());
    if (written >= 0) {
      bytes.remove_prefix(static_cast<size_t>(written));
    } else if (errno != EINTR) {
      closed_ = true;
      if (errno != EPIPE) {
        status_ = absl::InternalError(
            absl::StrFormat("cannot write to standard output: %s", std::strerror(errno)));
      }
    }
  }
  return !closed_;
}

int PrintResult(std::string_view text) {
  ResultWriter writer;
  writer.Write(text);
  if (writer.status().ok()) return 0;
  Log(LogLevel::kError, std::string(writer.status().message()));
  return 1;
}

}  // namespace lockstep
