// Small messages between rank 0 and each other rank over TCP, apart from MPI: what the ranks still
// can say when one of them is gone or a collective hangs.
//
// Rank 0 listens on a free port during Connect alone. The ranks learn its addresses, the port and a
// random token through the communicator; each tries 127.0.0.1 first, then the others. The same
// host name or a local address says nothing about who answers (network namespaces, containers), so
// both sides show that they know the token.
#pragma once

#include <poll.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "parallel/communicator.h"

namespace lockstep {

// A message's kind is the caller's affair.
struct StarMessage {
  uint32_t kind = 0;
  std::string body;
};

// What a Poll has found about one peer: messages in order, and whether the connection has ended
// behind them.
struct StarNews {
  int peer = 0;
  std::vector<StarMessage> messages;
  bool closed = false;
};

// Thread rule: one thread at a time.
class RankStar {
 public:
  static constexpr size_t kMaxBodyBytes = 64 << 10;

  // COLLECTIVE. Errors are the same on all ranks: FailedPrecondition naming the rank that cannot
  // reach rank 0 within `limit`, and what it tried. One rank connects to nobody.
  static absl::StatusOr<std::unique_ptr<RankStar>> Connect(
      Communicator& communicator, std::chrono::duration<double> limit = std::chrono::seconds(10));
  ~RankStar();
  RankStar(const RankStar&) = delete;
  RankStar& operator=(const RankStar&) = delete;

  // Ranks that this one is connected with: 0, or all but 0.
  std::vector<int> Peers() const;
  // Never waits: what the system does not take now goes with a later Send or Poll. Does nothing
  // where the connection has ended.
  void Send(int peer, uint32_t kind, std::string_view body);
  // Waits at most `timeout` for news of the peers, or for one of `others` (whose revents are set).
  std::vector<StarNews> Poll(std::chrono::duration<double> timeout, std::span<pollfd> others = {});

 private:
  struct Peer {
    int fd = -1;
    std::string unsent;
    std::string received;  // no whole message yet
  };

  RankStar() = default;
  void Flush(Peer& peer);
  // False when the connection has ended.
  bool Receive(Peer& peer, StarNews& news);

  std::vector<Peer> peers_;  // by rank; fd -1: not connected
};

}  // namespace lockstep
