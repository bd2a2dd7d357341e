#include "parallel/rank_star.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "parallel/local_communicator.h"
#include "tests/parallel/forwarding_communicator.h"

namespace lockstep {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

void ExpectOk(const std::vector<absl::Status>& statuses) {
  for (const absl::Status& status : statuses) EXPECT_TRUE(status.ok()) << status;
}

TEST(RankStar, CarriesMessagesInOrder) {
  ExpectOk(RunLocalRanks(4, [](Communicator& communicator) -> absl::Status {
    LOCKSTEP_ASSIGN_OR_RETURN(const auto star, RankStar::Connect(communicator));
    const int rank = communicator.rank();
    EXPECT_EQ(star->Peers().size(), rank == 0 ? 3u : 1u);
    const std::string large(RankStar::kMaxBodyBytes, 'x');
    if (rank != 0) {
      for (uint32_t i = 0; i < 20; ++i) star->Send(0, i, i == 7 ? large : std::to_string(rank));
    }
    std::vector<uint32_t> next(4, 0);
    while (rank == 0 && next != std::vector<uint32_t>{0, 20, 20, 20}) {
      for (const StarNews& news : star->Poll(seconds(5))) {
        EXPECT_FALSE(news.closed);
        for (const StarMessage& message : news.messages) {
          EXPECT_EQ(message.kind, next[static_cast<size_t>(news.peer)]++);
          EXPECT_EQ(message.body, message.kind == 7 ? large : std::to_string(news.peer));
        }
      }
    }
    if (rank != 0) star->Poll(milliseconds(10));  // sends what was left
    return communicator.Barrier();
  }));
}

TEST(RankStar, WhatWasSaidBeforeTheEndIsHeard) {
  ExpectOk(RunLocalRanks(2, [](Communicator& communicator) -> absl::Status {
    LOCKSTEP_ASSIGN_OR_RETURN(auto star, RankStar::Connect(communicator));
    if (communicator.rank() == 1) {
      star->Send(0, 3, "last words");
      star.reset();
      return communicator.Barrier();
    }
    LOCKSTEP_RETURN_IF_ERROR(communicator.Barrier());
    const std::vector<StarNews> news = star->Poll(seconds(5));
    EXPECT_EQ(news.size(), 1u);
    EXPECT_EQ(news.at(0).messages.at(0).body, "last words");
    EXPECT_TRUE(news.at(0).closed);
    EXPECT_TRUE(star->Peers().empty());
    star->Send(1, 1, "nobody there");
    return absl::OkStatus();
  }));
}

// Changes the invitation that a rank receives, or does something when it comes. The port lies
// behind the two keys of 16 bytes.
class InvitationCommunicator : public ForwardingCommunicator {
 public:
  static constexpr size_t kKeyOfRank0 = 0, kPort = 32;

  InvitationCommunicator(Communicator& inner, std::function<void(char* invitation)> on_invitation)
      : ForwardingCommunicator(inner), on_invitation_(std::move(on_invitation)) {}

  absl::Status Broadcast(void* data, int64_t bytes, int root) override {
    const absl::Status status = ForwardingCommunicator::Broadcast(data, bytes, root);
    if (rank() != root) on_invitation_(static_cast<char*>(data));
    return status;
  }

 private:
  const std::function<void(char*)> on_invitation_;
};

int PortOf(const char* invitation) {
  int32_t port;
  std::memcpy(&port, invitation + InvitationCommunicator::kPort, sizeof(port));
  return port;
}

int ConnectTo(int port) {
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  EXPECT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  return fd;
}

TEST(RankStar, StrangersHaveNoPartInIt) {
  std::vector<int> strangers;  // of rank 1
  int port = 0;
  ExpectOk(RunLocalRanks(2, [&](Communicator& inner) -> absl::Status {
    InvitationCommunicator communicator(inner, [&](char* invitation) {
      port = PortOf(invitation);
      strangers.push_back(ConnectTo(port));  // says nothing
      strangers.push_back(ConnectTo(port));  // says something else, of a length that is enough
      const std::string other = "GET / HTTP/1.1\r\nHost: somewhere\r\nAccept: */*\r\n\r\n";
      EXPECT_EQ(send(strangers[1], other.data(), other.size(), 0), std::ssize(other));
    });
    LOCKSTEP_ASSIGN_OR_RETURN(const auto star, RankStar::Connect(communicator));
    star->Send(1 - communicator.rank(), 5, "hello");
    const std::vector<StarNews> news = star->Poll(seconds(5));
    EXPECT_EQ(news.size(), 1u);
    EXPECT_EQ(news.at(0).messages.at(0).body, "hello");
    return communicator.Barrier();
  }));
  // And once all are there, nobody listens any more.
  char byte;
  for (const int fd : strangers) {
    EXPECT_LE(recv(fd, &byte, 1, 0), 0);
    close(fd);
  }
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  EXPECT_NE(connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  close(fd);
}

// All ranks are refused with the words of the one that could not connect.
std::string Refusal(const std::function<void(char*)>& spoil) {
  const std::vector<absl::Status> statuses =
      RunLocalRanks(3, [&](Communicator& inner) -> absl::Status {
        InvitationCommunicator communicator(inner, [&](char* invitation) {
          if (inner.rank() == 2) spoil(invitation);
        });
        return RankStar::Connect(communicator, milliseconds(200)).status();
      });
  for (const absl::Status& status : statuses) {
    EXPECT_EQ(status, statuses[0]);
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  }
  return std::string(statuses[0].message());
}

TEST(RankStar, RefusesARankThatCannotReachRank0) {
  const std::string closed = Refusal([](char* invitation) {
    const int32_t port = 1;
    std::memcpy(invitation + InvitationCommunicator::kPort, &port, sizeof(port));
  });
  for (const char* part :
       {"rank 2 (", "port 1 (127.0.0.1: Connection refused", "--watchdog-seconds 0"}) {
    EXPECT_NE(closed.find(part), std::string::npos) << closed;
  }
  const std::string other =
      Refusal([](char* invitation) { ++invitation[InvitationCommunicator::kKeyOfRank0]; });
  for (const char* part : {"rank 2 (", "(127.0.0.1: something else answers there"}) {
    EXPECT_NE(other.find(part), std::string::npos) << other;
  }
}

}  // namespace
}  // namespace lockstep
