// What the tests of the HTTP server share: a client that sends raw bytes, and a server whose
// requests the test answers itself.
#pragma once

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "launch/http/http_server.h"

namespace lockstep {

struct TestResponse {
  int status = 0;  // 0: the connection ended first
  std::string head;
  std::string body;
  int num_chunks = 0;     // of a chunked body
  bool complete = false;  // as its framing says

  std::string Header(const std::string& name) const {
    const size_t at = head.find("\r\n" + name + ": ");
    if (at == std::string::npos) return "";
    const size_t start = at + name.size() + 4;
    return head.substr(start, head.find("\r\n", start) - start);
  }
};

class TestClient {
 public:
  explicit TestClient(int port, int family = AF_INET)
      : TestClient(socket(family, SOCK_STREAM, 0), port, family) {}
  // Takes a socket that was made beforehand.
  TestClient(int fd, int port, int family) : fd_(fd) {
    sockaddr_in v4 = {};
    v4.sin_family = AF_INET;
    v4.sin_port = htons(static_cast<uint16_t>(port));
    v4.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    sockaddr_in6 v6 = {};
    v6.sin6_family = AF_INET6;
    v6.sin6_port = v4.sin_port;
    v6.sin6_addr = in6addr_loopback;
    const auto* address = family == AF_INET ? reinterpret_cast<const sockaddr*>(&v4)
                                            : reinterpret_cast<const sockaddr*>(&v6);
    const socklen_t size = family == AF_INET ? sizeof(v4) : sizeof(v6);
    connected_ = fd_ >= 0 && connect(fd_, address, size) == 0;
    const int on = 1;
    setsockopt(fd_, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  }
  TestClient(TestClient&& other) noexcept
      : fd_(std::exchange(other.fd_, -1)),
        connected_(other.connected_),
        unread_(std::move(other.unread_)) {}
  TestClient& operator=(TestClient&&) = delete;
  ~TestClient() { Close(); }

  bool connected() const { return connected_; }
  void Close() {
    if (fd_ >= 0) close(std::exchange(fd_, -1));
  }
  // Closes so that the other end gets a reset.
  void Reset() {
    const linger hard = {1, 0};
    setsockopt(fd_, SOL_SOCKET, SO_LINGER, &hard, sizeof(hard));
    Close();
  }
  void EndSending() { shutdown(fd_, SHUT_WR); }
  void ShrinkReceiveBuffer() {
    const int size = 4096;
    setsockopt(fd_, SOL_SOCKET, SO_RCVBUF, &size, sizeof(size));
  }

  // False when the other end has closed.
  bool Send(const std::string& bytes) {
    size_t sent = 0;
    while (sent < bytes.size()) {
      const ssize_t now = send(fd_, bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL);
      if (now <= 0) return false;
      sent += static_cast<size_t>(now);
    }
    return true;
  }

  // Waits for more bytes. False: none will come, or none came in time.
  bool ReadMore(double seconds = 10) {
    pollfd wait = {fd_, POLLIN, 0};
    if (poll(&wait, 1, static_cast<int>(seconds * 1000)) <= 0) return false;
    char buffer[16384];
    const ssize_t got = recv(fd_, buffer, sizeof(buffer), 0);
    if (got <= 0) {
      ended_ = true;
      return false;
    }
    unread_.append(buffer, static_cast<size_t>(got));
    return true;
  }
  // What has come and was not taken by ReadResponse.
  const std::string& unread() const { return unread_; }
  void Discard() { unread_.clear(); }
  std::string ReadToEnd() {
    while (ReadMore()) {
    }
    return std::exchange(unread_, "");
  }
  // The other end has closed, with nothing before that.
  bool ReadsEnd(double seconds = 10) { return unread_.empty() && !ReadMore(seconds) && ended_; }
  bool WaitFor(const std::string& text) {
    while (unread_.find(text) == std::string::npos) {
      if (!ReadMore()) return false;
    }
    return true;
  }

  TestResponse ReadResponse(bool head_only = false) {
    TestResponse response;
    if (!WaitFor("\r\n\r\n")) return response;
    const size_t end = unread_.find("\r\n\r\n") + 4;
    response.head = unread_.substr(0, end);
    unread_.erase(0, end);
    if (response.head.compare(0, 9, "HTTP/1.1 ") != 0) return response;
    response.status = std::stoi(response.head.substr(9, 3));
    if (head_only || response.status < 200) {
      response.complete = true;
    } else if (!response.Header("Content-Length").empty()) {
      const size_t length = std::stoul(response.Header("Content-Length"));
      while (unread_.size() < length && ReadMore()) {
      }
      response.complete = unread_.size() >= length;
      response.body = unread_.substr(0, length);
      unread_.erase(0, length);
    } else if (response.Header("Transfer-Encoding") == "chunked") {
      ReadChunks(response);
    } else {
      response.body = ReadToEnd();
      response.complete = ended_;
    }
    return response;
  }
  TestResponse Ask(const std::string& request) {
    return Send(request) ? ReadResponse() : TestResponse();
  }

 private:
  void ReadChunks(TestResponse& response) {
    while (true) {
      if (!WaitFor("\r\n")) return;
      const size_t line = unread_.find("\r\n") + 2;
      const size_t size = std::stoul(unread_, nullptr, 16);
      while (unread_.size() < line + size + 2) {
        if (!ReadMore()) return;
      }
      response.body += unread_.substr(line, size);
      unread_.erase(0, line + size + 2);
      if (size == 0) {
        response.complete = true;
        return;
      }
      ++response.num_chunks;
    }
  }

  int fd_;
  bool connected_ = false;
  bool ended_ = false;
  std::string unread_;
};

// Waits for what another thread does.
inline bool Eventually(const std::function<bool()>& condition, double seconds = 10) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

inline void Sleep(double seconds) {
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
}

// GET and POST of `path`, ready to be sent.
inline std::string Get(const std::string& path, const std::string& headers = "") {
  return "GET " + path + " HTTP/1.1\r\nHost: test\r\n" + headers + "\r\n";
}
inline std::string Post(const std::string& path, const std::string& body) {
  return "POST " + path +
         " HTTP/1.1\r\nHost: test\r\nContent-Length: " + std::to_string(body.size()) + "\r\n\r\n" +
         body;
}

// /echo is answered at once with "METHOD path?query body"; a path in `handlers` by its function;
// all others wait in Next() for the test.
class TestServer {
 public:
  using Handlers = std::vector<std::pair<std::string, HttpHandler>>;

  explicit TestServer(HttpServerOptions options = {}, Handlers handlers = {})
      : handlers_(std::move(handlers)) {
    options.port = 0;
    absl::StatusOr<std::unique_ptr<HttpServer>> server = HttpServer::Create(
        options, [this](std::shared_ptr<HttpExchange> exchange) { Handle(std::move(exchange)); },
        [](int status, const std::string& message) {
          return "{\"error\":\"" + std::to_string(status) + " " + message + "\"}";
        });
    EXPECT_TRUE(server.ok()) << server.status();
    if (server.ok()) server_ = *std::move(server);
  }

  HttpServer& server() { return *server_; }
  TestClient Connect() { return TestClient(server_->port()); }
  void Stop() { server_.reset(); }

  std::shared_ptr<HttpExchange> Next() {
    std::unique_lock lock(mutex_);
    if (!changed_.wait_for(lock, std::chrono::seconds(20), [&] { return !held_.empty(); })) {
      ADD_FAILURE() << "no request came";
      return nullptr;
    }
    std::shared_ptr<HttpExchange> exchange = std::move(held_.front());
    held_.pop_front();
    return exchange;
  }

 private:
  void Handle(std::shared_ptr<HttpExchange> exchange) {
    const HttpRequest& request = exchange->request();
    for (const auto& [path, handler] : handlers_) {
      if (path == request.path) return handler(std::move(exchange));
    }
    if (request.path == "/echo") {
      exchange->Respond(
          200, {{"Content-Type", "text/plain"}},
          request.method + " " + request.path + "?" + request.query + " " + request.body);
      return;
    }
    const std::lock_guard lock(mutex_);
    held_.push_back(std::move(exchange));
    changed_.notify_all();
  }

  const Handlers handlers_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<HttpExchange>> held_;
  std::unique_ptr<HttpServer> server_;
};

}  // namespace lockstep
