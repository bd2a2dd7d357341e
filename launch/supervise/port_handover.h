// The port of a supervised server, which outlives the ranks.
//
// The supervisor owns the listening sockets for as long as it lives; rank 0 asks it for copies of
// them, by the host and port of its own command line, instead of binding. So there is no moment at
// which nobody listens: clients that come while one process lets go and the other takes over wait
// in the kernel's queue of the one socket. (Two sockets that both bind, by turns or with
// SO_REUSEPORT, leave a gap, or lose what waits in the queue of the one that is closed.) A port
// that is in use is found at the first start, and port 0 stays the same port afterwards.
//
// Rank 0 finds the supervisor by the environment's LOCKSTEP_SUPERVISOR, the name of an abstract
// Unix socket that only processes of the same user are answered on: it has to run on the same host.
// The connection between the two is the lease: it ends when rank 0 has closed its server or died,
// however it died, and the supervisor answers from then on.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "launch/http/http_listener.h"
#include "launch/http/http_server.h"
#include "runtime/core/status.h"

namespace lockstep {

inline constexpr char kSupervisorVariable[] = "LOCKSTEP_SUPERVISOR";

// Rank 0's end. Empty where there is no supervisor.
class PortLease {
 public:
  PortLease() = default;
  explicit PortLease(OwnedFd connection) : connection_(std::move(connection)) {}

  // The server answers requests from now on.
  void TellReady();

 private:
  OwnedFd connection_;
};

struct LeasedPort {
  HttpListeners listeners;
  PortLease lease;  // while it lives, the supervisor does not accept
};

// From the supervisor, or without one as ListenOn. Errors as ListenOn; FailedPrecondition, too,
// when there is no such supervisor on this host.
absl::StatusOr<LeasedPort> TakePort(const std::string& host, int port);

// The supervisor's end. One thread, which waits until one of the two file descriptors is readable
// and then calls OnEvents. While rank 0 has no lease, a thread of HttpServer calls `answer`.
class PortKeeper {
 public:
  using Clock = std::chrono::steady_clock;

  static absl::StatusOr<std::unique_ptr<PortKeeper>> Create(HttpHandler answer,
                                                            HttpErrorBody error_body);

  // The value of LOCKSTEP_SUPERVISOR.
  const std::string& name() const { return name_; }
  int listener_fd() const { return listener_.get(); }
  int lease_fd() const { return lease_.get(); }  // -1: none
  void OnEvents();

  // Rank 0 holds the port and is ready.
  bool is_ready() const { return ready_since_.has_value(); }
  // How long the rank 0 that last held the port was ready; zero after Forget.
  Clock::duration ready_time() const;
  void Forget() { ready_time_ = {}; }

 private:
  PortKeeper() = default;

  void Accept();
  void Read();
  absl::Status Grant(const std::string& request);
  void EndLease();
  void StartAnswering();

  HttpHandler answer_;
  HttpErrorBody error_body_;
  std::string name_;
  OwnedFd listener_;
  OwnedFd lease_;
  bool granted_ = false;  // lease_ has got the sockets
  std::string asked_;     // the request that made `port_`
  HttpListeners port_;    // no sockets before the first request
  std::unique_ptr<HttpServer> server_;
  std::optional<Clock::time_point> ready_since_;
  Clock::duration ready_time_{};
};

}  // namespace lockstep
