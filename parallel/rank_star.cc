#include "parallel/rank_star.h"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "parallel/rank_star_connect.h"

namespace lockstep {

namespace {

// In front of a message's body.
struct Header {
  uint32_t kind = 0;
  uint32_t body_bytes = 0;
};

// A peer that reads nothing gets no more than this.
constexpr size_t kMaxUnsentBytes = 256 << 10;

}  // namespace

absl::StatusOr<std::unique_ptr<RankStar>> RankStar::Connect(Communicator& communicator,
                                                            std::chrono::duration<double> limit) {
  LOCKSTEP_ASSIGN_OR_RETURN(const std::vector<int> fds, ConnectRanks(communicator, limit));
  std::unique_ptr<RankStar> star(new RankStar());
  for (const int fd : fds) star->peers_.push_back({.fd = fd, .unsent = {}, .received = {}});
  return star;
}

RankStar::~RankStar() {
  for (Peer& peer : peers_) {
    if (peer.fd >= 0) close(peer.fd);
  }
}

std::vector<int> RankStar::Peers() const {
  std::vector<int> ranks;
  for (size_t rank = 0; rank < peers_.size(); ++rank) {
    if (peers_[rank].fd >= 0) ranks.push_back(static_cast<int>(rank));
  }
  return ranks;
}

void RankStar::Send(int peer, uint32_t kind, std::string_view body) {
  LOCKSTEP_CHECK(body.size() <= kMaxBodyBytes);
  Peer& to = peers_[static_cast<size_t>(peer)];
  if (to.fd < 0 || to.unsent.size() > kMaxUnsentBytes) return;
  const Header header = {kind, static_cast<uint32_t>(body.size())};
  to.unsent.append(reinterpret_cast<const char*>(&header), sizeof(header));
  to.unsent.append(body);
  Flush(to);
}

void RankStar::Flush(Peer& peer) {
  while (!peer.unsent.empty()) {
    const ssize_t sent =
        send(peer.fd, peer.unsent.data(), peer.unsent.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0) return;  // not now; or the connection has ended, which Poll finds out
    peer.unsent.erase(0, static_cast<size_t>(sent));
  }
}

std::vector<StarNews> RankStar::Poll(std::chrono::duration<double> timeout,
                                     std::span<pollfd> others) {
  std::vector<pollfd> entries(others.begin(), others.end());
  const std::vector<int> ranks = Peers();
  for (const int rank : ranks) {
    const Peer& peer = peers_[static_cast<size_t>(rank)];
    const int events = POLLIN | (peer.unsent.empty() ? 0 : POLLOUT);
    entries.push_back({.fd = peer.fd, .events = static_cast<short>(events), .revents = 0});
  }
  const auto milliseconds = std::chrono::ceil<std::chrono::milliseconds>(timeout).count();
  std::vector<StarNews> all;
  if (poll(entries.data(), entries.size(), static_cast<int>(std::max<int64_t>(0, milliseconds))) <=
      0) {
    return all;
  }
  std::copy_n(entries.begin(), others.size(), others.begin());
  for (size_t i = 0; i < ranks.size(); ++i) {
    const int events = entries[others.size() + i].revents;
    if (events == 0) continue;
    Peer& peer = peers_[static_cast<size_t>(ranks[i])];
    StarNews news{.peer = ranks[i], .messages = {}, .closed = false};
    if ((events & POLLOUT) != 0) Flush(peer);
    if ((events & ~POLLOUT) != 0 && !Receive(peer, news)) {
      close(peer.fd);
      peer.fd = -1;
      news.closed = true;
    }
    if (news.closed || !news.messages.empty()) all.push_back(std::move(news));
  }
  return all;
}

bool RankStar::Receive(Peer& peer, StarNews& news) {
  bool open = true;
  while (true) {
    std::array<char, 4096> bytes;
    const ssize_t got = recv(peer.fd, bytes.data(), bytes.size(), MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
    if (got <= 0) {
      open = false;
      break;
    }
    peer.received.append(bytes.data(), static_cast<size_t>(got));
  }
  size_t at = 0;
  Header header;
  while (peer.received.size() - at >= sizeof(header)) {
    std::memcpy(&header, peer.received.data() + at, sizeof(header));
    if (header.body_bytes > kMaxBodyBytes) return false;  // no rank of this program sends that
    if (peer.received.size() - at - sizeof(header) < header.body_bytes) break;
    at += sizeof(header);
    news.messages.push_back({header.kind, peer.received.substr(at, header.body_bytes)});
    at += header.body_bytes;
  }
  peer.received.erase(0, at);
  return open;
}

}  // namespace lockstep
