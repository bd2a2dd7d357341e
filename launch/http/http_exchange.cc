#include "launch/http/http_exchange.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <exception>
#include <utility>

#include "runtime/core/log.h"

namespace lockstep {

absl::StatusOr<std::shared_ptr<HttpOutbox>> HttpOutbox::Create(int64_t max_buffered_bytes) {
  const int fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  if (fd < 0) return absl::ResourceExhaustedError(absl::StrCat("eventfd: ", strerror(errno)));
  return std::shared_ptr<HttpOutbox>(new HttpOutbox(fd, max_buffered_bytes));
}

HttpOutbox::~HttpOutbox() { close(wake_fd_); }

void HttpOutbox::Notify(std::shared_ptr<ServedExchange> exchange) {
  {
    const std::lock_guard lock(mutex_);
    if (stopped_) return;
    notices_.push_back(std::move(exchange));
    if (std::exchange(awake_, true)) return;
  }
  Wake();
}

void HttpOutbox::Wake() {
  const uint64_t one = 1;
  // Fails only when the counter is full, and then the thread is awake.
  [[maybe_unused]] const ssize_t written = write(wake_fd_, &one, sizeof(one));
}

std::vector<std::shared_ptr<ServedExchange>> HttpOutbox::Collect() {
  uint64_t count = 0;
  [[maybe_unused]] const ssize_t got = read(wake_fd_, &count, sizeof(count));
  const std::lock_guard lock(mutex_);
  awake_ = false;
  return std::exchange(notices_, {});
}

void HttpOutbox::Stop() {
  std::vector<std::shared_ptr<ServedExchange>> dropped;
  const std::lock_guard lock(mutex_);
  stopped_ = true;
  dropped.swap(notices_);
}

ServedExchange::ServedExchange(HttpRequest request, HttpReservation body,
                               std::shared_ptr<HttpOutbox> outbox, int64_t max_unsent_bytes,
                               std::shared_ptr<const HttpErrorBody> error_body)
    : request_(std::move(request)),
      body_(std::move(body)),
      outbox_(std::move(outbox)),
      max_unsent_bytes_(max_unsent_bytes),
      error_body_(std::move(error_body)),
      unsent_(outbox_) {}

std::shared_ptr<HttpExchange> ServedExchange::Handle() {
  return std::shared_ptr<HttpExchange>(
      this, [self = shared_from_this()](HttpExchange*) { self->Abandon(); });
}

void ServedExchange::Respond(int status, const HttpHeaders& headers, std::string body) {
  std::function<void()> dropped;  // what it owns may be large, or call back here
  std::unique_lock lock(mutex_);
  if (phase_ != Phase::kOpen) return;
  phase_ = Phase::kEnded;
  dropped = std::move(on_gone_);
  if (gone_) return;
  output_.begins = output_.whole = output_.ended = true;
  output_.status = status;
  output_.headers = headers;
  output_.body = std::move(body);
  Announce(std::move(lock));
}

void ServedExchange::Begin(int status, const HttpHeaders& headers) {
  std::unique_lock lock(mutex_);
  if (phase_ != Phase::kOpen) return;
  phase_ = Phase::kBegun;
  if (gone_) return;
  output_.begins = true;
  output_.status = status;
  output_.headers = headers;
  Announce(std::move(lock));
}

void ServedExchange::Write(std::string piece) {
  if (piece.empty() || gone_) return;
  std::unique_lock lock(mutex_);
  if (phase_ != Phase::kBegun || gone_) return;
  const auto waiting = sending_bytes_ + static_cast<int64_t>(output_.body.size());
  const auto bytes = static_cast<int64_t>(piece.size());
  if (waiting > 0 && (waiting + bytes > max_unsent_bytes_ || outbox_->full())) {
    gone_ = true;
    Break();
  } else if (output_.body.empty()) {
    output_.body = std::move(piece);
  } else {
    output_.body += piece;
  }
  Announce(std::move(lock));
}

void ServedExchange::End() {
  std::function<void()> dropped;
  std::unique_lock lock(mutex_);
  if (phase_ != Phase::kBegun) return;
  phase_ = Phase::kEnded;
  dropped = std::move(on_gone_);
  if (gone_) return;
  output_.ended = true;
  Announce(std::move(lock));
}

void ServedExchange::OnGone(std::function<void()> callback) {
  {
    const std::lock_guard lock(mutex_);
    if (phase_ == Phase::kEnded) return;
    if (!gone_) {
      on_gone_.swap(callback);
      return;
    }
  }
  callback();
}

ServedExchange::Output ServedExchange::Take() {
  const std::lock_guard lock(mutex_);
  announced_ = false;
  sending_bytes_ += static_cast<int64_t>(output_.body.size());
  return std::exchange(output_, {});
}

void ServedExchange::SetSending(int64_t bytes) {
  const std::lock_guard lock(mutex_);
  sending_bytes_ = bytes;
  Account();
}

void ServedExchange::GoAway() {
  std::function<void()> callback;
  Output dropped;
  {
    const std::lock_guard lock(mutex_);
    gone_ = true;
    dropped = std::exchange(output_, {});
    sending_bytes_ = 0;
    Account();
    callback = std::exchange(on_gone_, nullptr);
  }
  if (!callback) return;
  try {
    callback();
  } catch (...) {
    LogWarning("HTTP: what was to run when a client goes has failed");
  }
}

void ServedExchange::Abandon() {
  std::unique_lock lock(mutex_);
  if (phase_ == Phase::kEnded || gone_) return;
  const bool begun = phase_ == Phase::kBegun;
  if (begun) {
    phase_ = Phase::kEnded;
    Break();
    Announce(std::move(lock));
  } else {
    lock.unlock();
  }
  LogWarning(absl::StrFormat("HTTP: request %s (%s %s) was left without an answer",
                             request_.request_id, request_.method, request_.path));
  if (begun) return;
  HttpErrorText text = MakeErrorText(*error_body_, 500, "the request was left without an answer");
  Respond(500, {{"Content-Type", text.content_type}}, std::move(text.body));
}

void ServedExchange::Break() {
  broken_ = true;
  output_ = {};
  announced_ = false;  // an earlier word may wait for the client to take what was sent
}

void ServedExchange::Announce(std::unique_lock<std::mutex> lock) {
  Account();
  const bool known = std::exchange(announced_, true);
  lock.unlock();
  if (!known) outbox_->Notify(shared_from_this());
}

void ServedExchange::Account() {
  unsent_.Set(sending_bytes_ + static_cast<int64_t>(output_.body.size()));
}

HttpErrorText MakeErrorText(const HttpErrorBody& error_body, int status,
                            const std::string& message) {
  if (error_body) {
    try {
      return {"application/json", error_body(status, message)};
    } catch (const std::exception& e) {
      LogWarning(absl::StrCat("HTTP: the body of an error could not be made: ", e.what()));
    }
  }
  return {"text/plain; charset=utf-8", message + "\n"};
}

}  // namespace lockstep
