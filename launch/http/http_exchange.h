// What threads that answer share with the server's thread: the exchanges, and the list of those
// that have something to send. No sockets here.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "launch/http/http_server.h"

namespace lockstep {

class HttpConnection;
class ServedExchange;

// Where threads leave word for the server's thread. One wake-up serves all that is left until the
// thread has come, so that 256 pieces of one step cost one system call. Outlives the server with
// the last exchange.
class HttpOutbox {
 public:
  static absl::StatusOr<std::shared_ptr<HttpOutbox>> Create(int64_t max_buffered_bytes);
  ~HttpOutbox();

  // Any thread. Nothing happens behind Stop.
  void Notify(std::shared_ptr<ServedExchange> exchange);
  void Wake();

  // The server's thread: what came since the last call, each exchange once a notice.
  std::vector<std::shared_ptr<ServedExchange>> Collect();
  void Stop();
  int wake_fd() const { return wake_fd_; }  // readable when there is something

  // Bytes held for clients: bodies of requests, responses not sent yet.
  void AddBuffered(int64_t bytes) { buffered_bytes_ += bytes; }
  bool full() const { return buffered_bytes_ > max_buffered_bytes_; }

 private:
  HttpOutbox(int wake_fd, int64_t max_buffered_bytes)
      : wake_fd_(wake_fd), max_buffered_bytes_(max_buffered_bytes) {}

  const int wake_fd_;
  const int64_t max_buffered_bytes_;
  std::atomic<int64_t> buffered_bytes_ = 0;
  std::mutex mutex_;
  std::vector<std::shared_ptr<ServedExchange>> notices_;
  bool awake_ = false;  // the wake-up was sent and not yet collected
  bool stopped_ = false;
};

// A share of the outbox's bytes, given back at the end.
class HttpReservation {
 public:
  explicit HttpReservation(std::shared_ptr<HttpOutbox> outbox) : outbox_(std::move(outbox)) {}
  HttpReservation(HttpReservation&& other) noexcept
      : outbox_(std::move(other.outbox_)), bytes_(std::exchange(other.bytes_, 0)) {}
  HttpReservation& operator=(HttpReservation&&) = delete;
  ~HttpReservation() {
    if (outbox_ != nullptr) outbox_->AddBuffered(-bytes_);
  }
  void Set(int64_t bytes) {
    outbox_->AddBuffered(bytes - bytes_);
    bytes_ = bytes;
  }
  bool full() const { return outbox_->full(); }

 private:
  std::shared_ptr<HttpOutbox> outbox_;
  int64_t bytes_ = 0;
};

class ServedExchange final : public HttpExchange,
                             public std::enable_shared_from_this<ServedExchange> {
 public:
  // `body`: the reservation of request.body.
  ServedExchange(HttpRequest request, HttpReservation body, std::shared_ptr<HttpOutbox> outbox,
                 int64_t max_unsent_bytes, std::shared_ptr<const HttpErrorBody> error_body);

  // What the handler gets: when the last copy goes, the exchange must have been answered.
  std::shared_ptr<HttpExchange> Handle();

  const HttpRequest& request() const override { return request_; }
  void Respond(int status, const HttpHeaders& headers, std::string body) override;
  void Begin(int status, const HttpHeaders& headers) override;
  void Write(std::string piece) override;
  void End() override;
  bool gone() const override { return gone_; }
  void OnGone(std::function<void()> callback) override;

  // What was answered since the last Take.
  struct Output {
    bool begins = false;  // status and headers are set
    int status = 0;
    HttpHeaders headers;
    bool whole = false;  // with `begins`: `body` is all there is
    std::string body;
    bool ended = false;  // and there will be no more
  };
  // The rest is for the server's thread. From here on new output makes a notice.
  Output Take();
  // The connection is to be closed at once, whatever is still to be sent.
  bool broken() const { return broken_; }
  // How much of what was taken is not sent yet.
  void SetSending(int64_t bytes);
  // The client has gone: drops what was not taken, runs the callback.
  void GoAway();

  HttpConnection* connection = nullptr;  // null when the connection has done with it

 private:
  enum class Phase { kOpen, kBegun, kEnded };

  void Abandon();
  void Break();  // holding mutex_
  // Tells the server's thread unless it knows already. Lets go of `lock`.
  void Announce(std::unique_lock<std::mutex> lock);
  void Account();

  const HttpRequest request_;
  const HttpReservation body_;
  const std::shared_ptr<HttpOutbox> outbox_;
  const int64_t max_unsent_bytes_;
  const std::shared_ptr<const HttpErrorBody> error_body_;

  std::atomic<bool> gone_ = false;
  std::atomic<bool> broken_ = false;
  std::mutex mutex_;
  Phase phase_ = Phase::kOpen;
  Output output_;
  int64_t sending_bytes_ = 0;
  HttpReservation unsent_;
  bool announced_ = true;  // the handler's caller looks by itself
  std::function<void()> on_gone_;
};

// The body of an error and its content type.
struct HttpErrorText {
  std::string content_type;
  std::string body;
};
HttpErrorText MakeErrorText(const HttpErrorBody& error_body, int status,
                            const std::string& message);

}  // namespace lockstep
