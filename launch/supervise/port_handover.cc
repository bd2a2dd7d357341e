#include "launch/supervise/port_handover.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "runtime/core/log.h"

namespace lockstep {

namespace {

// Messages, one a packet: "PORT HOST" from rank 0; "+PORT" with the sockets, or "-" and what is
// wrong, back; "ready" from rank 0.
constexpr size_t kMaxMessageBytes = 64 << 10;
constexpr size_t kMaxSockets = 64;
// For what the supervisor is just answering, before rank 0 gets the port.
constexpr double kCloseSeconds = 0.5;

struct SocketName {
  sockaddr_un address = {};
  socklen_t size = 0;
};

// In the abstract namespace, which leaves no file behind.
SocketName AbstractName(const std::string& name) {
  SocketName result;
  result.address.sun_family = AF_UNIX;
  const size_t length = std::min(name.size(), sizeof(result.address.sun_path) - 1);
  std::memcpy(result.address.sun_path + 1, name.data(), length);
  result.size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + length);
  return result;
}

absl::Status SystemError(const std::string& what) {
  return absl::FailedPreconditionError(absl::StrCat(what, ": ", std::strerror(errno)));
}

// A message with file descriptors beside it.
struct Packet {
  std::array<char, kMaxMessageBytes> text;
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int) * kMaxSockets)> control = {};
  iovec part = {text.data(), text.size()};
  msghdr header = {};

  Packet() {
    header.msg_iov = &part;
    header.msg_iovlen = 1;
  }
};

void Send(int fd, const std::string& text, const std::vector<OwnedFd>& sockets) {
  Packet packet;
  packet.part.iov_len = text.copy(packet.text.data(), packet.text.size());
  if (!sockets.empty()) {
    const size_t bytes = sizeof(int) * sockets.size();
    packet.header.msg_control = packet.control.data();
    packet.header.msg_controllen = CMSG_SPACE(bytes);
    cmsghdr* const control = CMSG_FIRSTHDR(&packet.header);
    control->cmsg_level = SOL_SOCKET;
    control->cmsg_type = SCM_RIGHTS;
    control->cmsg_len = CMSG_LEN(bytes);
    for (size_t i = 0; i < sockets.size(); ++i) {
      const int socket = sockets[i].get();
      std::memcpy(CMSG_DATA(control) + i * sizeof(int), &socket, sizeof(int));
    }
  }
  // A peer that has gone is seen when its end of the connection is read.
  sendmsg(fd, &packet.header, MSG_NOSIGNAL);
}

// Waits for the message. Empty at the end of the connection.
std::string Receive(int fd, std::vector<OwnedFd>* sockets) {
  Packet packet;
  packet.header.msg_control = packet.control.data();
  packet.header.msg_controllen = packet.control.size();
  ssize_t count;
  do {
    count = recvmsg(fd, &packet.header, MSG_CMSG_CLOEXEC);
  } while (count < 0 && errno == EINTR);
  if (count <= 0) return "";
  const cmsghdr* const control = CMSG_FIRSTHDR(&packet.header);
  if (control != nullptr && control->cmsg_type == SCM_RIGHTS) {
    const size_t num_sockets = (control->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < num_sockets; ++i) {
      int socket;
      std::memcpy(&socket, CMSG_DATA(control) + i * sizeof(int), sizeof(int));
      sockets->emplace_back(socket);
    }
  }
  return std::string(packet.text.data(), static_cast<size_t>(count));
}

absl::StatusOr<OwnedFd> ConnectTo(const std::string& supervisor) {
  OwnedFd fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  const SocketName name = AbstractName(supervisor);
  if (fd.get() < 0 ||
      connect(fd.get(), reinterpret_cast<const sockaddr*>(&name.address), name.size) != 0) {
    return SystemError(absl::StrFormat(
        "%s=%s: no `lockstep supervise` answers there; rank 0 has to run on its host",
        kSupervisorVariable, supervisor));
  }
  return fd;
}

absl::StatusOr<LeasedPort> Ask(OwnedFd connection, const std::string& host, int port) {
  LeasedPort leased;
  Send(connection.get(), absl::StrCat(port, " ", host), {});
  const std::string text = Receive(connection.get(), &leased.listeners.sockets);
  if (text.empty()) {
    return absl::FailedPreconditionError(
        "`lockstep supervise` has no port to give: another rank 0 has it, or it has ended");
  }
  if (text[0] == '-') return absl::FailedPreconditionError(text.substr(1));
  if (!absl::SimpleAtoi(text.substr(1), &leased.listeners.port) ||
      leased.listeners.sockets.empty()) {
    return absl::FailedPreconditionError(
        "`lockstep supervise` gave no sockets: no memory for them?");
  }
  leased.lease = PortLease(std::move(connection));
  return leased;
}

bool IsOfThisUser(int connection) {
  ucred peer = {};
  socklen_t size = sizeof(peer);
  return getsockopt(connection, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 &&
         peer.uid == geteuid();
}

}  // namespace

void PortLease::TellReady() {
  if (connection_.get() >= 0) Send(connection_.get(), "ready", {});
}

absl::StatusOr<LeasedPort> TakePort(const std::string& host, int port) {
  const char* const supervisor = std::getenv(kSupervisorVariable);
  if (supervisor != nullptr) {
    LOCKSTEP_ASSIGN_OR_RETURN(OwnedFd connection, ConnectTo(supervisor));
    return Ask(std::move(connection), host, port);
  }
  LeasedPort own;
  LOCKSTEP_ASSIGN_OR_RETURN(own.listeners, ListenOn(host, port));
  return own;
}

absl::StatusOr<std::unique_ptr<PortKeeper>> PortKeeper::Create(HttpHandler answer,
                                                               HttpErrorBody error_body) {
  std::unique_ptr<PortKeeper> keeper(new PortKeeper);
  keeper->answer_ = std::move(answer);
  keeper->error_body_ = std::move(error_body);
  // Process ids alone may repeat in containers that share a network.
  keeper->name_ = absl::StrFormat("lockstep-supervise-%d-%x", getpid(),
                                  Clock::now().time_since_epoch().count());
  keeper->listener_ = OwnedFd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const SocketName name = AbstractName(keeper->name_);
  const int fd = keeper->listener_.get();
  if (fd < 0 || bind(fd, reinterpret_cast<const sockaddr*>(&name.address), name.size) != 0 ||
      listen(fd, 8) != 0) {
    return SystemError("the Unix socket " + keeper->name_);
  }
  return keeper;
}

void PortKeeper::OnEvents() {
  Read();  // first: the end of a lease comes before the next one
  Accept();
}

void PortKeeper::Accept() {
  OwnedFd peer(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (peer.get() < 0 || lease_.get() >= 0 || !IsOfThisUser(peer.get())) return;
  lease_ = std::move(peer);
  granted_ = false;
  Read();
}

void PortKeeper::Read() {
  if (lease_.get() < 0) return;
  errno = 0;
  std::vector<OwnedFd> none;
  const std::string message = Receive(lease_.get(), &none);
  if (message.empty()) {
    if (errno != EAGAIN) EndLease();
  } else if (granted_) {
    if (!ready_since_.has_value()) ready_since_ = Clock::now();
  } else if (absl::Status status = Grant(message); !status.ok()) {
    Send(lease_.get(), absl::StrCat("-", std::string(status.message())), {});
    EndLease();
  }
}

absl::Status PortKeeper::Grant(const std::string& request) {
  if (port_.sockets.empty()) {
    const size_t space = std::min(request.find(' '), request.size() - 1);
    int number = -1;
    if (!absl::SimpleAtoi(request.substr(0, space), &number)) {
      return absl::InvalidArgumentError("no rank 0 of this version asks for a port like that");
    }
    LOCKSTEP_ASSIGN_OR_RETURN(HttpListeners port, ListenOn(request.substr(space + 1), number));
    if (port.sockets.size() > kMaxSockets) {
      return absl::FailedPreconditionError(
          absl::StrFormat("the host's name has more than %d addresses", kMaxSockets));
    }
    port_ = std::move(port);
    asked_ = request;
  }
  if (request != asked_) {
    return absl::FailedPreconditionError(
        absl::StrFormat("rank 0 asks `lockstep supervise` for another port than before: %s, not %s",
                        request, asked_));
  }
  if (server_ != nullptr) server_->Drain(kCloseSeconds);
  server_.reset();
  Send(lease_.get(), absl::StrCat("+", port_.port), port_.sockets);
  granted_ = true;
  return absl::OkStatus();
}

void PortKeeper::EndLease() {
  ready_time_ = ready_time();
  ready_since_.reset();
  lease_ = OwnedFd();
  StartAnswering();
}

void PortKeeper::StartAnswering() {
  if (port_.sockets.empty() || server_ != nullptr) return;
  HttpListeners copies;
  copies.port = port_.port;
  for (const OwnedFd& socket : port_.sockets) {
    copies.sockets.emplace_back(fcntl(socket.get(), F_DUPFD_CLOEXEC, 0));
  }
  auto server = HttpServer::Create(std::move(copies), {}, answer_, error_body_);
  if (server.ok()) {
    server_ = *std::move(server);
  } else {
    LogWarning(absl::StrCat("nobody answers for the failed server: ",
                            std::string(server.status().message())));
  }
}

PortKeeper::Clock::duration PortKeeper::ready_time() const {
  return ready_since_.has_value() ? Clock::now() - *ready_since_ : ready_time_;
}

}  // namespace lockstep
