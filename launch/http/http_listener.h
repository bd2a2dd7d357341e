// Listening sockets.
#pragma once

#include <string>
#include <vector>

#include "runtime/core/status.h"

namespace lockstep {

// A file descriptor and its end.
class OwnedFd {
 public:
  explicit OwnedFd(int fd = -1) : fd_(fd) {}
  OwnedFd(OwnedFd&& other) noexcept : fd_(other.Release()) {}
  OwnedFd& operator=(OwnedFd&& other) noexcept;
  ~OwnedFd();
  int get() const { return fd_; }
  int Release();

 private:
  int fd_;
};

struct HttpListeners {
  std::vector<OwnedFd> sockets;  // non-blocking, listening, all on `port`
  int port = 0;
};

// Every address that `host` stands for; see HttpServerOptions. InvalidArgument for what cannot be a
// host or port, FailedPrecondition when the system refuses: in use, not of this machine, not
// permitted. Messages name host, port and the reason.
absl::StatusOr<HttpListeners> ListenOn(const std::string& host, int port);

}  // namespace lockstep
