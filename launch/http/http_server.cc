#include "launch/http/http_server.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <csignal>
#include <cstring>
#include <mutex>
#include <system_error>
#include <thread>
#include <unordered_map>
#include <utility>

#include "launch/http/http_connection.h"
#include "launch/http/http_exchange.h"
#include "launch/http/http_listener.h"
#include "runtime/core/log.h"

namespace lockstep {
namespace {

constexpr std::chrono::milliseconds kTick(100);
constexpr int kEventsAtOnce = 256;
constexpr int kAcceptsAtOnce = 64;
constexpr size_t kScratchBytes = 64 << 10;
// Beyond max_connections: told 503. Beyond these, too, they are closed without a word.
constexpr int64_t kRefusedConnections = 64;
// What the process opens beside connections.
constexpr int64_t kOtherFiles = 256;
constexpr std::chrono::seconds kAcceptLogInterval(10);

void RaiseFileLimit(int64_t max_connections) {
  rlimit limit = {};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  const auto wanted = static_cast<rlim_t>(max_connections + kRefusedConnections + kOtherFiles);
  if (limit.rlim_cur >= wanted) return;
  limit.rlim_cur = std::min(wanted, limit.rlim_max);
  setrlimit(RLIMIT_NOFILE, &limit);
  if (limit.rlim_cur < wanted) {
    LogWarning(absl::StrFormat("HTTP: this process may open %d files; %d connections may need %d",
                               limit.rlim_cur, max_connections, wanted));
  }
}

std::string PeerName(const sockaddr_storage& address, socklen_t size) {
  std::array<char, NI_MAXHOST> host;
  std::array<char, NI_MAXSERV> port;
  if (getnameinfo(reinterpret_cast<const sockaddr*>(&address), size, host.data(), host.size(),
                  port.data(), port.size(), NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
    return "unknown";
  }
  std::string name = host.data();
  constexpr std::string_view kMapped = "::ffff:";
  if (name.compare(0, kMapped.size(), kMapped) == 0 && name.find('.') != std::string::npos) {
    name.erase(0, kMapped.size());
  } else if (address.ss_family == AF_INET6) {
    name = "[" + name + "]";
  }
  return name + ":" + port.data();
}

void Set(int fd, int level, int option, int value) {
  setsockopt(fd, level, option, &value, sizeof(value));
}

void SetUpClient(int fd, double idle_seconds) {
  Set(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  // A client whose machine is gone says nothing. What is sent to it must be acknowledged in time,
  // and while it waits for an answer it is asked from time to time whether it is there.
  const double milliseconds = std::clamp(idle_seconds, 1.0, 3600.0) * 1000;
  Set(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, static_cast<int>(milliseconds));
  Set(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  Set(fd, IPPROTO_TCP, TCP_KEEPIDLE, 30);
  Set(fd, IPPROTO_TCP, TCP_KEEPINTVL, 10);
  Set(fd, IPPROTO_TCP, TCP_KEEPCNT, 4);
}

class EpollHttpServer final : public HttpServer {
 public:
  static absl::StatusOr<std::unique_ptr<HttpServer>> Create(HttpListeners listeners,
                                                            const HttpServerOptions& options,
                                                            HttpHandler handler,
                                                            HttpErrorBody error_body);
  ~EpollHttpServer() override;

  int port() const override { return port_; }
  void StopAccepting() override;
  void Drain(double seconds) override;
  int64_t num_connections() const override { return num_connections_; }

 private:
  class Listener final : public HttpWatch {
   public:
    Listener(OwnedFd fd, EpollHttpServer& server) : fd_(std::move(fd)), server_(server) {}
    void OnEvents(uint32_t /*events*/) override { server_.Accept(fd_.get()); }
    int fd() const { return fd_.get(); }

   private:
    OwnedFd fd_;
    EpollHttpServer& server_;
  };
  class Waker final : public HttpWatch {
   public:
    explicit Waker(EpollHttpServer& server) : server_(server) {}
    void OnEvents(uint32_t /*events*/) override { server_.OnNotices(); }

   private:
    EpollHttpServer& server_;
  };

  EpollHttpServer() : waker_(*this) {}

  absl::Status Start(HttpListeners listeners);
  // True: epoll took it.
  bool Watch(int operation, int fd, uint32_t events, HttpWatch* watch);

  // The server's thread.
  void Run();
  void Round();
  int MillisecondsToWait() const;
  void OnNotices();
  // True: there may be more.
  bool Accept(int listener);
  void AddConnection(OwnedFd fd, std::string peer);
  void PauseAccepting(int error);
  void CloseListeners();
  void OnTick();
  void DeleteClosed();
  // Runs what concerns one watch; an exception ends that one alone.
  template <typename Function>
  void Guard(HttpWatch& watch, Function function);

  HttpContext context_;
  OwnedFd epoll_;
  Waker waker_;
  std::vector<std::unique_ptr<Listener>> listeners_;
  std::unordered_map<HttpConnection*, std::unique_ptr<HttpConnection>> connections_;
  int port_ = 0;
  HttpClock::time_point next_tick_;
  bool accepting_paused_ = false;
  HttpClock::time_point next_accept_log_;

  std::atomic<bool> close_listeners_ = false;
  std::atomic<bool> stop_ = false;
  std::atomic<int64_t> num_connections_ = 0;
  std::mutex drain_mutex_;
  std::condition_variable drained_;
  bool idle_ = false;  // no listener, no connection
  std::thread thread_;
};

absl::StatusOr<std::unique_ptr<HttpServer>> EpollHttpServer::Create(
    HttpListeners listeners, const HttpServerOptions& options, HttpHandler handler,
    HttpErrorBody error_body) {
  std::unique_ptr<EpollHttpServer> server(new EpollHttpServer);
  HttpContext& context = server->context_;
  context.options = options;
  context.handler = std::move(handler);
  context.error_body = std::make_shared<const HttpErrorBody>(std::move(error_body));
  LOCKSTEP_ASSIGN_OR_RETURN(context.outbox, HttpOutbox::Create(options.max_buffered_bytes));
  context.scratch.resize(kScratchBytes);
  RaiseFileLimit(options.max_connections);
  LOCKSTEP_RETURN_IF_ERROR(server->Start(std::move(listeners)));
  return server;
}

absl::Status EpollHttpServer::Start(HttpListeners listeners) {
  epoll_ = OwnedFd(epoll_create1(EPOLL_CLOEXEC));
  context_.epoll_fd = epoll_.get();
  port_ = listeners.port;
  bool watched = Watch(EPOLL_CTL_ADD, context_.outbox->wake_fd(), EPOLLIN, &waker_);
  for (OwnedFd& socket : listeners.sockets) {
    listeners_.push_back(std::make_unique<Listener>(std::move(socket), *this));
    Listener& listener = *listeners_.back();
    watched = watched && Watch(EPOLL_CTL_ADD, listener.fd(), EPOLLIN, &listener);
  }
  if (!watched) return absl::ResourceExhaustedError(absl::StrCat("epoll: ", strerror(errno)));
  // Signals are for the threads that were there before.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  const absl::Status started = CatchExhaustion("HTTP server", [this] {
    thread_ = std::thread([this] { Run(); });
    return absl::OkStatus();
  });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (started.ok()) pthread_setname_np(thread_.native_handle(), "lockstep-http");
  return started;
}

EpollHttpServer::~EpollHttpServer() {
  if (!thread_.joinable()) return;
  stop_ = true;
  context_.outbox->Wake();
  thread_.join();
}

void EpollHttpServer::StopAccepting() {
  close_listeners_ = true;
  context_.outbox->Wake();
}

void EpollHttpServer::Drain(double seconds) {
  StopAccepting();
  std::unique_lock lock(drain_mutex_);
  const auto time = std::chrono::duration<double>(std::clamp(seconds, 0.0, 1e9));
  drained_.wait_for(lock, std::chrono::duration_cast<std::chrono::nanoseconds>(time),
                    [this] { return idle_; });
}

bool EpollHttpServer::Watch(int operation, int fd, uint32_t events, HttpWatch* watch) {
  epoll_event event = {};
  event.events = events;
  event.data.ptr = watch;
  return epoll_ctl(epoll_.get(), operation, fd, &event) == 0;
}

template <typename Function>
void EpollHttpServer::Guard(HttpWatch& watch, Function function) {
  try {
    function();
  } catch (const std::exception& e) {
    LogWarning(absl::StrCat("HTTP: a connection failed: ", e.what()));
    watch.OnFailure();
  } catch (...) {
    LogWarning("HTTP: a connection failed");
    watch.OnFailure();
  }
}

void EpollHttpServer::Run() {
  context_.now = HttpClock::now();
  while (!stop_) Round();
  for (const auto& [connection, owned] : connections_) connection->Close();
  context_.outbox->Stop();
  context_.closed.clear();
  connections_.clear();
  listeners_.clear();
}

int EpollHttpServer::MillisecondsToWait() const {
  if (!context_.ready.empty()) return 0;
  if (connections_.empty() && !accepting_paused_) return -1;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(next_tick_ - HttpClock::now());
  return static_cast<int>(std::max<int64_t>(left.count(), 0));
}

void EpollHttpServer::Round() {
  std::array<epoll_event, kEventsAtOnce> events;
  const int count = epoll_wait(epoll_.get(), events.data(), kEventsAtOnce, MillisecondsToWait());
  context_.now = HttpClock::now();
  for (int i = 0; i < count; ++i) {
    auto& watch = *static_cast<HttpWatch*>(events[static_cast<size_t>(i)].data.ptr);
    Guard(watch, [&] { watch.OnEvents(events[static_cast<size_t>(i)].events); });
  }
  const std::vector<HttpConnection*> ready = std::exchange(context_.ready, {});
  for (HttpConnection* connection : ready) {
    Guard(*connection, [connection] { connection->OnReady(); });
  }
  if (close_listeners_ && !context_.closing) CloseListeners();
  if (context_.now >= next_tick_) OnTick();
  DeleteClosed();
}

void EpollHttpServer::OnNotices() {
  for (const std::shared_ptr<ServedExchange>& exchange : context_.outbox->Collect()) {
    HttpConnection* connection = exchange->connection;
    if (connection != nullptr) Guard(*connection, [connection] { connection->OnOutput(); });
  }
}

bool EpollHttpServer::Accept(int listener) {
  for (int i = 0; i < kAcceptsAtOnce; ++i) {
    sockaddr_storage address = {};
    socklen_t size = sizeof(address);
    OwnedFd fd(accept4(listener, reinterpret_cast<sockaddr*>(&address), &size,
                       SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (fd.get() >= 0) {
      SetUpClient(fd.get(), context_.options.idle_seconds);
      AddConnection(std::move(fd), PeerName(address, size));
    } else if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
      PauseAccepting(errno);
      return false;
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      return false;
    }  // else the client has left already
  }
  return true;
}

void EpollHttpServer::AddConnection(OwnedFd fd, std::string peer) {
  const auto count = static_cast<int64_t>(connections_.size());
  const int64_t limit = context_.options.max_connections;
  if (count >= limit + kRefusedConnections) return;
  auto connection = std::make_unique<HttpConnection>(fd.get(), std::move(peer), context_);
  fd.Release();
  HttpConnection& added = *connection;
  connections_.emplace(&added, std::move(connection));
  num_connections_ = static_cast<int64_t>(connections_.size());
  Guard(added, [&] { added.Start(count >= limit); });
}

// Clients wait in the backlog meanwhile. Asking again at once would only burn the core.
void EpollHttpServer::PauseAccepting(int error) {
  accepting_paused_ = true;
  for (const auto& listener : listeners_) Watch(EPOLL_CTL_MOD, listener->fd(), 0, listener.get());
  if (context_.now < next_accept_log_) return;
  next_accept_log_ = context_.now + kAcceptLogInterval;
  LogWarning(absl::StrFormat("HTTP: new connections have to wait: %s (%d are open)",
                             strerror(error), connections_.size()));
}

void EpollHttpServer::CloseListeners() {
  // Those in the backlog count as accepted: their clients have connected.
  for (const auto& listener : listeners_) {
    while (Accept(listener->fd())) {
    }
    // Closing does not end the watch where there are copies of the socket.
    Watch(EPOLL_CTL_DEL, listener->fd(), 0, listener.get());
  }
  listeners_.clear();
  accepting_paused_ = false;
  context_.closing = true;
  for (const auto& [connection, owned] : connections_) {
    Guard(*connection, [c = connection] { c->OnClosing(); });
  }
}

void EpollHttpServer::OnTick() {
  next_tick_ = context_.now + kTick;
  for (const auto& [connection, owned] : connections_) {
    Guard(*connection, [c = connection] { c->OnTick(); });
  }
  if (!accepting_paused_) return;
  accepting_paused_ = false;
  for (const auto& listener : listeners_) {
    Watch(EPOLL_CTL_MOD, listener->fd(), EPOLLIN, listener.get());
  }
}

void EpollHttpServer::DeleteClosed() {
  for (HttpConnection* connection : std::exchange(context_.closed, {})) {
    std::erase(context_.ready, connection);
    connections_.erase(connection);
  }
  num_connections_ = static_cast<int64_t>(connections_.size());
  if (!context_.closing || !connections_.empty()) return;
  const std::lock_guard lock(drain_mutex_);
  idle_ = true;
  drained_.notify_all();
}

}  // namespace

absl::StatusOr<std::unique_ptr<HttpServer>> HttpServer::Create(const HttpServerOptions& options,
                                                               HttpHandler handler,
                                                               HttpErrorBody error_body) {
  LOCKSTEP_ASSIGN_OR_RETURN(HttpListeners listeners, ListenOn(options.host, options.port));
  return Create(std::move(listeners), options, std::move(handler), std::move(error_body));
}

absl::StatusOr<std::unique_ptr<HttpServer>> HttpServer::Create(HttpListeners listeners,
                                                               const HttpServerOptions& options,
                                                               HttpHandler handler,
                                                               HttpErrorBody error_body) {
  return EpollHttpServer::Create(std::move(listeners), options, std::move(handler),
                                 std::move(error_body));
}

}  // namespace lockstep
