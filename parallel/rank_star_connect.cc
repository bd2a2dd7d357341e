#include "parallel/rank_star_connect.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <random>
#include <string>
#include <utility>

#include "absl/strings/str_join.h"

namespace lockstep {

namespace {

using Clock = std::chrono::steady_clock;
using Limit = Clock::time_point;

constexpr int kMaxAddresses = 32;
// For each address of rank 0: one that drops packets does not use up the time of the next.
constexpr std::chrono::seconds kAddressLimit(2);
// Rank 0 waits so much longer than the others try, so that theirs is the message.
constexpr std::chrono::seconds kMoreForRank0(2);
constexpr char kConfirm = 'j';

using Key = std::array<uint64_t, 2>;

// Where rank 0 listens. IPv4 addresses are mapped ones (::ffff:a.b.c.d).
struct Invitation {
  Key key_of_rank0 = {};   // what rank 0 answers
  Key key_of_others = {};  // what the others say first
  int32_t port = 0;
  int32_t num_addresses = 0;
  std::array<in6_addr, kMaxAddresses> addresses = {};
};

struct Hello {
  Key key = {};
  int64_t rank = 0;
};

// Owns a descriptor.
class Socket {
 public:
  Socket() = default;
  explicit Socket(int fd) : fd_(fd) {}
  Socket(Socket&& other) noexcept : fd_(other.Release()) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Socket() {
    if (fd_ >= 0) close(fd_);
  }
  int get() const { return fd_; }
  int Release() { return std::exchange(fd_, -1); }

 private:
  int fd_ = -1;
};

Key RandomKey() {
  std::random_device random;
  const auto word = [&] { return (static_cast<uint64_t>(random()) << 32) | random(); };
  return {word(), word()};
}

int MillisecondsTo(Limit limit) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(limit - Clock::now()).count();
  return static_cast<int>(std::max<int64_t>(0, left));
}

// "" or why not.
std::string WaitFor(int fd, int events, Limit limit) {
  while (true) {
    pollfd entry = {.fd = fd, .events = static_cast<short>(events), .revents = 0};
    const int ready = poll(&entry, 1, MillisecondsTo(limit));
    if (ready > 0) return "";
    if (ready == 0) return "no answer";
    if (errno != EINTR) return std::strerror(errno);
  }
}

std::string ReceiveAll(int fd, void* data, size_t bytes, Limit limit) {
  char* to = static_cast<char*>(data);
  while (bytes > 0) {
    if (std::string why = WaitFor(fd, POLLIN, limit); !why.empty()) return why;
    const ssize_t got = recv(fd, to, bytes, 0);
    if (got == 0) return "the connection was ended";
    if (got < 0 && errno != EAGAIN && errno != EINTR) return std::strerror(errno);
    if (got <= 0) continue;
    to += got;
    bytes -= static_cast<size_t>(got);
  }
  return "";
}

// A new connection takes some bytes without waiting.
std::string SendAll(int fd, const void* data, size_t bytes) {
  const ssize_t sent = send(fd, data, bytes, MSG_NOSIGNAL);
  if (sent == static_cast<ssize_t>(bytes)) return "";
  return sent < 0 ? std::strerror(errno) : "it takes nothing";
}

void SendAtOnce(int fd) {
  const int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
}

in6_addr Mapped(in_addr address) {
  in6_addr mapped = {};
  mapped.s6_addr[10] = mapped.s6_addr[11] = 0xff;
  std::memcpy(&mapped.s6_addr[12], &address, sizeof(address));
  return mapped;
}

std::string AddressText(const in6_addr& address) {
  std::array<char, INET6_ADDRSTRLEN> text = {};
  if (IN6_IS_ADDR_V4MAPPED(&address)) {
    inet_ntop(AF_INET, &address.s6_addr[12], text.data(), text.size());
  } else {
    inet_ntop(AF_INET6, &address, text.data(), text.size());
  }
  return text.data();
}

// 127.0.0.1, then those of all interfaces that are up. Link-local ones of IPv6 mean something else
// on each host.
void ListAddresses(Invitation& invitation) {
  const auto add = [&](const in6_addr& address) {
    if (invitation.num_addresses == kMaxAddresses) return;
    invitation.addresses[static_cast<size_t>(invitation.num_addresses++)] = address;
  };
  add(Mapped({htonl(INADDR_LOOPBACK)}));
  ifaddrs* interfaces = nullptr;
  if (getifaddrs(&interfaces) != 0) return;
  for (const ifaddrs* i = interfaces; i != nullptr; i = i->ifa_next) {
    const bool usable = i->ifa_addr != nullptr && (i->ifa_flags & IFF_UP) != 0 &&
                        (i->ifa_flags & IFF_LOOPBACK) == 0;
    if (!usable) continue;
    if (i->ifa_addr->sa_family == AF_INET) {
      sockaddr_in address;
      std::memcpy(&address, i->ifa_addr, sizeof(address));
      add(Mapped(address.sin_addr));
    } else if (i->ifa_addr->sa_family == AF_INET6) {
      sockaddr_in6 address;
      std::memcpy(&address, i->ifa_addr, sizeof(address));
      if (!IN6_IS_ADDR_LINKLOCAL(&address.sin6_addr)) add(address.sin6_addr);
    }
  }
  freeifaddrs(interfaces);
}

// With a free port of all addresses; where the host has no IPv6, of those of IPv4.
absl::StatusOr<Socket> Listen(Invitation& invitation) {
  sockaddr_in6 any6 = {};
  any6.sin6_family = AF_INET6;
  sockaddr_in any4 = {};
  any4.sin_family = AF_INET;
  constexpr int kType = SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK;
  Socket listener(socket(AF_INET6, kType, 0));
  const int off = 0;
  bool bound = listener.get() >= 0 &&
               setsockopt(listener.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off)) == 0 &&
               bind(listener.get(), reinterpret_cast<sockaddr*>(&any6), sizeof(any6)) == 0;
  if (!bound) {
    listener = Socket(socket(AF_INET, kType, 0));
    bound = listener.get() >= 0 &&
            bind(listener.get(), reinterpret_cast<sockaddr*>(&any4), sizeof(any4)) == 0;
  }
  sockaddr_in6 mine = {};
  socklen_t length = sizeof(mine);
  if (!bound || listen(listener.get(), SOMAXCONN) != 0 ||
      getsockname(listener.get(), reinterpret_cast<sockaddr*>(&mine), &length) != 0) {
    return absl::FailedPreconditionError(
        absl::StrFormat("listening for the other ranks: %s", std::strerror(errno)));
  }
  // The port lies in the same place in addresses of both families.
  invitation.port = ntohs(mine.sin6_port);
  return listener;
}

// "" and a connected socket, or why not.
std::string Dial(const in6_addr& address, int port, Limit limit, Socket& connected) {
  const bool is_ipv4 = IN6_IS_ADDR_V4MAPPED(&address);
  sockaddr_in6 to6 = {};
  to6.sin6_family = AF_INET6;
  to6.sin6_port = htons(static_cast<uint16_t>(port));
  to6.sin6_addr = address;
  sockaddr_in to4 = {};
  to4.sin_family = AF_INET;
  to4.sin_port = to6.sin6_port;
  std::memcpy(&to4.sin_addr, &address.s6_addr[12], sizeof(to4.sin_addr));
  const auto* const to =
      is_ipv4 ? reinterpret_cast<const sockaddr*>(&to4) : reinterpret_cast<const sockaddr*>(&to6);
  connected = Socket(socket(to->sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (connected.get() < 0) return std::strerror(errno);
  if (connect(connected.get(), to, is_ipv4 ? sizeof(to4) : sizeof(to6)) == 0) return "";
  if (errno != EINPROGRESS) return std::strerror(errno);
  if (std::string why = WaitFor(connected.get(), POLLOUT, limit); !why.empty()) return why;
  int error = 0;
  socklen_t length = sizeof(error);
  getsockopt(connected.get(), SOL_SOCKET, SO_ERROR, &error, &length);
  return error == 0 ? "" : std::strerror(error);
}

// "" when rank 0 of this job answers there.
std::string Greet(const in6_addr& address, const Invitation& invitation, int rank, Limit limit,
                  Socket& connected) {
  if (std::string why = Dial(address, invitation.port, limit, connected); !why.empty()) return why;
  SendAtOnce(connected.get());
  const Hello hello = {invitation.key_of_others, rank};
  if (std::string why = SendAll(connected.get(), &hello, sizeof(hello)); !why.empty()) return why;
  Key answer = {};
  if (std::string why = ReceiveAll(connected.get(), &answer, sizeof(answer), limit); !why.empty()) {
    return why;
  }
  if (answer != invitation.key_of_rank0) return "something else answers there";
  return SendAll(connected.get(), &kConfirm, sizeof(kConfirm));
}

absl::StatusOr<Socket> Join(const Invitation& invitation, int rank, Limit limit) {
  std::vector<std::string> tried;
  for (int i = 0; i < invitation.num_addresses; ++i) {
    const in6_addr& address = invitation.addresses[static_cast<size_t>(i)];
    Socket connected;
    const Limit mine = std::min<Limit>(limit, Clock::now() + kAddressLimit);
    const std::string why = Greet(address, invitation, rank, mine, connected);
    if (why.empty()) return connected;
    tried.push_back(absl::StrCat(AddressText(address), ": ", why));
  }
  return absl::FailedPreconditionError(absl::StrFormat(
      "the watchdog cannot connect to rank 0, port %d (%s); let the ranks' hosts reach each other, "
      "or do without it: --watchdog-seconds 0",
      invitation.port, absl::StrJoin(tried, ", ")));
}

// A connection that has not said all of who it is.
struct Guest {
  Socket socket;
  int64_t rank = -1;  // known and answered: the confirmation is missing
  std::string received;
};

// Rank 0's side.
class Host {
 public:
  Host(const Invitation& invitation, Socket listener, int size)
      : invitation_(invitation), listener_(std::move(listener)), joined_(size) {}

  absl::StatusOr<std::vector<Socket>> AcceptAll(Limit limit) {
    while (num_missing() > 0) {
      std::vector<pollfd> entries = {{.fd = listener_.get(), .events = POLLIN, .revents = 0}};
      for (const Guest& guest : guests_) {
        entries.push_back({.fd = guest.socket.get(), .events = POLLIN, .revents = 0});
      }
      if (Clock::now() >= limit) return Missing();
      if (poll(entries.data(), entries.size(), MillisecondsTo(limit)) <= 0) continue;
      std::vector<Guest> staying;
      for (size_t i = 0; i < guests_.size(); ++i) {
        if (entries[i + 1].revents == 0 || Hear(guests_[i])) {
          staying.push_back(std::move(guests_[i]));
        }
      }
      guests_ = std::move(staying);
      if (entries[0].revents != 0) Accept();
    }
    return std::move(joined_);
  }

 private:
  int64_t num_missing() const {
    return std::count_if(joined_.begin() + 1, joined_.end(),
                         [](const Socket& socket) { return socket.get() < 0; });
  }

  absl::Status Missing() const {
    size_t rank = 1;
    while (joined_[rank].get() >= 0) ++rank;
    return absl::FailedPreconditionError(absl::StrFormat(
        "the watchdog of rank %d has not connected to port %d; do without it: --watchdog-seconds 0",
        rank, invitation_.port));
  }

  void Accept() {
    Guest guest;
    guest.socket = Socket(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (guest.socket.get() < 0) return;
    SendAtOnce(guest.socket.get());
    guests_.push_back(std::move(guest));
  }

  // False when the guest is none any more: it has joined, or was sent away.
  bool Hear(Guest& guest) {
    const size_t wanted = guest.rank < 0 ? sizeof(Hello) : sizeof(kConfirm);
    std::array<char, sizeof(Hello)> bytes;
    const ssize_t got = recv(guest.socket.get(), bytes.data(), wanted - guest.received.size(), 0);
    if (got <= 0) return got < 0 && (errno == EAGAIN || errno == EINTR);
    guest.received.append(bytes.data(), static_cast<size_t>(got));
    if (guest.received.size() < wanted) return true;
    if (guest.rank >= 0) {
      joined_[static_cast<size_t>(guest.rank)] = std::move(guest.socket);
      return false;
    }
    Hello hello;
    std::memcpy(&hello, guest.received.data(), sizeof(hello));
    guest.received.clear();
    if (hello.key != invitation_.key_of_others || hello.rank < 1 ||
        hello.rank >= std::ssize(joined_)) {
      return false;
    }
    guest.rank = hello.rank;
    return SendAll(guest.socket.get(), &invitation_.key_of_rank0, sizeof(invitation_.key_of_rank0))
        .empty();
  }

  const Invitation& invitation_;
  Socket listener_;
  std::vector<Socket> joined_;  // by rank
  std::vector<Guest> guests_;
};

}  // namespace

absl::StatusOr<std::vector<int>> ConnectRanks(Communicator& communicator,
                                              std::chrono::duration<double> limit) {
  std::vector<int> fds(static_cast<size_t>(communicator.size()), -1);
  if (communicator.size() == 1) return fds;
  const bool hosts = communicator.rank() == 0;
  Invitation invitation;
  Socket listener;
  absl::Status status;
  if (hosts) {
    invitation.key_of_rank0 = RandomKey();
    invitation.key_of_others = RandomKey();
    ListAddresses(invitation);
    absl::StatusOr<Socket> listening = Listen(invitation);
    status = listening.status();
    if (listening.ok()) listener = *std::move(listening);
  }
  LOCKSTEP_RETURN_IF_ERROR(Agree(communicator, status));
  LOCKSTEP_RETURN_IF_ERROR(communicator.Broadcast(&invitation, sizeof(invitation), 0));
  const Limit until = Clock::now() + std::chrono::ceil<Clock::duration>(limit);
  std::vector<Socket> joined(fds.size());
  if (hosts) {
    auto accepted =
        Host(invitation, std::move(listener), communicator.size()).AcceptAll(until + kMoreForRank0);
    status = accepted.status();
    if (accepted.ok()) joined = *std::move(accepted);
  } else {
    absl::StatusOr<Socket> to_rank0 = Join(invitation, communicator.rank(), until);
    status = to_rank0.status();
    if (to_rank0.ok()) joined[0] = *std::move(to_rank0);
  }
  // What a rank has tried says more than that rank 0 has waited for it.
  LOCKSTEP_RETURN_IF_ERROR(Agree(communicator, hosts ? absl::OkStatus() : status));
  LOCKSTEP_RETURN_IF_ERROR(Agree(communicator, status));
  for (size_t rank = 0; rank < fds.size(); ++rank) fds[rank] = joined[rank].Release();
  return fds;
}

}  // namespace lockstep
