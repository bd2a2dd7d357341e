#include "launch/http/http_listener.h"

#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <utility>

namespace lockstep {
namespace {

using AddressList = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

absl::StatusOr<AddressList> Resolve(const std::string& host) {
  std::string name = host;
  if (name.size() > 2 && name.front() == '[' && name.back() == ']') {
    name = name.substr(1, name.size() - 2);
  }
  // getaddrinfo would read the end of the text at a NUL and take "" for this machine.
  if (name.empty() || name.find('\0') != std::string::npos) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "host '%s' is no name or address (0.0.0.0 and :: stand for all addresses)", host));
  }
  addrinfo hints = {};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  addrinfo* found = nullptr;
  const int error = getaddrinfo(name.c_str(), nullptr, &hints, &found);
  if (error != 0) {
    const std::string reason = error == EAI_SYSTEM ? strerror(errno) : gai_strerror(error);
    return absl::InvalidArgumentError(
        absl::StrFormat("host '%s' cannot be resolved: %s", host, reason));
  }
  return AddressList(found, &freeaddrinfo);
}

void SetPort(sockaddr& address, int port) {
  if (address.sa_family == AF_INET6) {
    reinterpret_cast<sockaddr_in6&>(address).sin6_port = htons(static_cast<uint16_t>(port));
  } else {
    reinterpret_cast<sockaddr_in&>(address).sin_port = htons(static_cast<uint16_t>(port));
  }
}

int PortOf(int fd) {
  sockaddr_storage address = {};
  socklen_t size = sizeof(address);
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) != 0) return 0;
  return ntohs(address.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(address).sin6_port
                                             : reinterpret_cast<sockaddr_in&>(address).sin_port);
}

// The errno of what failed in `error`; -1 then.
OwnedFd Listen(const addrinfo& info, int port, int* error) {
  OwnedFd fd(socket(info.ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  sockaddr_storage address = {};
  std::memcpy(&address, info.ai_addr, info.ai_addrlen);
  SetPort(reinterpret_cast<sockaddr&>(address), port);
  const int on = 1;
  bool good = fd.get() >= 0 && setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) == 0;
  if (good && info.ai_family == AF_INET6) {
    // :: is for all clients; a single address of a name leaves IPv4 to that name's other address.
    const auto& v6 = reinterpret_cast<sockaddr_in6&>(address);
    const int v6_only = IN6_IS_ADDR_UNSPECIFIED(&v6.sin6_addr) ? 0 : 1;
    good = setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &v6_only, sizeof(v6_only)) == 0;
  }
  good = good && bind(fd.get(), reinterpret_cast<sockaddr*>(&address), info.ai_addrlen) == 0 &&
         listen(fd.get(), SOMAXCONN) == 0;
  *error = good ? 0 : errno;
  return good ? std::move(fd) : OwnedFd();
}

absl::Status CannotListen(const std::string& host, int port, int error) {
  std::string reason = strerror(error);
  if (error == EADDRINUSE) reason = "the port is in use by another program";
  if (error == EADDRNOTAVAIL) reason = "that is no address of this machine";
  if (error == EACCES && port < 1024) reason = "ports below 1024 need special rights";
  return absl::FailedPreconditionError(
      absl::StrFormat("cannot listen on host %s, port %d: %s", host, port, reason));
}

}  // namespace

OwnedFd& OwnedFd::operator=(OwnedFd&& other) noexcept {
  if (fd_ >= 0) close(fd_);
  fd_ = other.Release();
  return *this;
}

OwnedFd::~OwnedFd() {
  if (fd_ >= 0) close(fd_);
}

int OwnedFd::Release() { return std::exchange(fd_, -1); }

absl::StatusOr<HttpListeners> ListenOn(const std::string& host, int port) {
  if (port < 0 || port > 65535) {
    return absl::InvalidArgumentError(absl::StrFormat("port %d is not in 0 to 65535", port));
  }
  LOCKSTEP_ASSIGN_OR_RETURN(const AddressList addresses, Resolve(host));
  HttpListeners listeners;
  listeners.port = port;
  int absent = 0;  // the last error of an address that this machine does not have
  for (const addrinfo* info = addresses.get(); info != nullptr; info = info->ai_next) {
    int error = 0;
    OwnedFd fd = Listen(*info, listeners.port, &error);
    if (error == EADDRNOTAVAIL || error == EAFNOSUPPORT) {
      absent = error;
    } else if (error != 0) {
      return CannotListen(host, listeners.port, error);
    } else {
      if (listeners.port == 0) listeners.port = PortOf(fd.get());
      listeners.sockets.push_back(std::move(fd));
    }
  }
  if (listeners.sockets.empty()) return CannotListen(host, port, absent);
  return listeners;
}

}  // namespace lockstep
