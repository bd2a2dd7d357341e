#include "launch/http/http_connection.h"

#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <exception>
#include <utility>

#include "runtime/core/log.h"

namespace lockstep {
namespace {

// Requests that came together and are answered before other connections have their turn.
constexpr int kRequestsAtOnce = 16;
// A client that does not close when everything was sent to it and the connection is to end.
constexpr std::chrono::seconds kLingerTime(2);
constexpr std::chrono::seconds kProbeInterval(1);
constexpr std::string_view kHeadStart = "HTTP/1.1 ";  // every head's
constexpr size_t kMaxChunkZeros = 4;                  // clients bound the digits of a chunk's size
// Up to here a piece is copied into one string with its frame; beyond, sent from where it is.
constexpr size_t kCopiedBytes = 16 << 10;
constexpr size_t kMaxVectors = 16;
constexpr size_t kKeptCapacity = 4 << 10;

bool WouldBlock(int error) { return error == EAGAIN || error == EWOULDBLOCK; }

HttpClock::duration Seconds(double seconds) {
  return std::chrono::duration_cast<HttpClock::duration>(std::chrono::duration<double>(seconds));
}

}  // namespace

HttpConnection::HttpConnection(int fd, std::string peer, HttpContext& context)
    : fd_(fd), peer_(std::move(peer)), context_(context) {}

HttpConnection::~HttpConnection() { close(fd_); }

void HttpConnection::Start(bool refused) {
  epoll_event event = {};
  event.data.ptr = static_cast<HttpWatch*>(this);
  if (epoll_ctl(context_.epoll_fd, EPOLL_CTL_ADD, fd_, &event) != 0) return Close();
  StartRequest();
  if (refused) {
    Refuse(503, absl::StrFormat("the server has %d connections, as many as it takes",
                                context_.options.max_connections));
  }
  UpdateInterest();
}

void HttpConnection::OnEvents(uint32_t events) {
  if (state_ == State::kClosed) return;
  // EPOLLHUP: both sides are closed, so that nothing can be sent any more.
  if ((events & (EPOLLERR | EPOLLHUP)) != 0) return Close();
  if ((events & EPOLLOUT) != 0) {
    Send();
    Flush();
  }
  if ((events & EPOLLIN) != 0) {
    Read();
  } else if ((events & EPOLLRDHUP) != 0) {
    OnHangUp();  // behind input that has not been read
  }
  ParseInput();
  UpdateInterest();
}

void HttpConnection::OnOutput() {
  Flush();
  ParseInput();
  UpdateInterest();
}

void HttpConnection::OnReady() {
  in_ready_ = false;
  ParseInput();
  UpdateInterest();
}

void HttpConnection::OnTick() {
  const HttpClock::time_point now = context_.now;
  if (sending() && now > last_progress_ + Seconds(context_.options.idle_seconds)) {
    LogInfo(absl::StrCat("HTTP: ", peer_, " takes nothing of what is sent to it: closed"));
    CloseHard();
  } else if (state_ == State::kReading && now > deadline_) {
    if (receiving_) {
      Refuse(408, absl::StrFormat("the request did not come within %g seconds",
                                  context_.options.idle_seconds));
    } else {
      Linger();
    }
  } else if (state_ == State::kLingering && now > deadline_) {
    Close();
  } else if (state_ == State::kAnswering && hang_up_ && now > last_probe_ + kProbeInterval) {
    Probe();
  }
  UpdateInterest();
}

void HttpConnection::OnClosing() {
  if (state_ != State::kReading) return;
  Read();  // a request may have come in this moment
  ParseInput();
  if (state_ == State::kReading && !receiving_) {
    if (num_requests_ > 0) {
      Linger();
    } else {  // it has only connected: its request is on the way
      deadline_ = std::min(deadline_, context_.now + kLingerTime);
    }
  }
  UpdateInterest();
}

void HttpConnection::Close() {
  if (state_ == State::kClosed) return;
  state_ = State::kClosed;
  epoll_ctl(context_.epoll_fd, EPOLL_CTL_DEL, fd_, nullptr);
  context_.closed.push_back(this);
  queue_.clear();
  next_ = 0;
  if (exchange_ == nullptr) return;
  const std::shared_ptr<ServedExchange> exchange = std::exchange(exchange_, nullptr);
  exchange->connection = nullptr;
  exchange->GoAway();
}

// Without a farewell: what the kernel still holds for this client is dropped.
void HttpConnection::CloseHard() {
  const linger reset = {1, 0};
  setsockopt(fd_, SOL_SOCKET, SO_LINGER, &reset, sizeof(reset));
  Close();
}

void HttpConnection::Read() {
  if (end_of_input_ || state_ == State::kClosed) return;
  std::vector<char>& scratch = context_.scratch;
  const ssize_t got = recv(fd_, scratch.data(), scratch.size(), 0);
  if (got < 0) {
    if (!WouldBlock(errno) && errno != EINTR) Close();
  } else if (got == 0) {
    end_of_input_ = true;
    OnHangUp();
  } else if (state_ == State::kReading || state_ == State::kAnswering) {
    input_.append(scratch.data(), static_cast<size_t>(got));
  }
}

void HttpConnection::OnHangUp() {
  if (state_ == State::kAnswering && !hang_up_) Probe();
  hang_up_ = true;
  if (state_ == State::kLingering && end_of_input_) Close();
}

// A client that has closed and one that has only ended its sending side look alike until something
// is sent: the closed one's end answers with a reset, which epoll reports. So bytes go out that the
// answer will begin with in any case, one a second while there are some.
void HttpConnection::Probe() {
  last_probe_ = context_.now;
  if (sending() || complete_) return;  // what is sent shows as much
  std::string_view probe;
  if (!begun_) {
    probe = kHeadStart.substr(probed_, 1);
  } else if (framing_ == HttpFraming::kChunked && !head_only_ && probed_ < kMaxChunkZeros) {
    probe = "0";
  }
  if (probe.empty()) return;
  const ssize_t sent = send(fd_, probe.data(), probe.size(), MSG_NOSIGNAL);
  if (sent > 0) {
    ++probed_;
  } else if (sent < 0 && !WouldBlock(errno) && errno != EINTR) {
    Close();
  }
}

void HttpConnection::StartRequest() {
  const HttpServerOptions& options = context_.options;
  parser_ = std::make_unique<HttpRequestParser>(
      HttpRequestLimits{options.max_header_bytes, options.max_body_bytes},
      HttpReservation(context_.outbox));
  state_ = State::kReading;
  receiving_ = false;
  deadline_ = context_.now + Seconds(options.idle_seconds);
  begun_ = complete_ = head_only_ = http10_ = false;
  probed_ = 0;
}

void HttpConnection::ParseInput() {
  int started = 0;
  deferred_ = false;
  while (state_ == State::kReading && !sending() && has_input()) {
    if (!receiving_) {
      // RFC 9112, 2.2: empty lines before a request are passed over.
      if (input_[parsed_] == '\r' || input_[parsed_] == '\n') {
        ++parsed_;
        continue;
      }
      deferred_ = started == kRequestsAtOnce;
      if (deferred_) break;
      receiving_ = true;
      deadline_ = context_.now + Seconds(context_.options.idle_seconds);
    }
    const bool had_header = parser_->header_done();
    const size_t read = parser_->Feed(input_.data() + parsed_, input_.size() - parsed_);
    parsed_ += read;
    if (parser_->error_status() != 0) {
      Refuse(parser_->error_status(), parser_->error_message());
    } else if (parser_->done()) {
      ++started;
      StartExchange();
    } else if (!had_header && parser_->header_done()) {
      if (parser_->expects_continue()) SendContinue();
    } else if (read == 0) {
      break;
    }
  }
  if (deferred_ && !in_ready_) context_.ready.push_back(this);
  in_ready_ = in_ready_ || deferred_;
  DropParsedInput();
  if (state_ != State::kReading || sending() || deferred_ || !end_of_input_) return;
  if (receiving_) {
    Refuse(400, "the request ends before its end");
  } else {
    Linger();
  }
}

void HttpConnection::DropParsedInput() {
  const bool needed = state_ == State::kReading || state_ == State::kAnswering;
  input_.erase(0, needed ? parsed_ : input_.size());
  parsed_ = 0;
  if (input_.empty() && input_.capacity() > kKeptCapacity) input_.shrink_to_fit();
}

void HttpConnection::SendContinue() {
  Queue("HTTP/1.1 100 Continue\r\n\r\n");
  Send();
}

void HttpConnection::StartExchange() {
  http10_ = parser_->http10();
  keep_alive_ = parser_->keep_alive();
  HttpRequest request = parser_->TakeRequest();
  request.request_id = ChooseRequestId(request.Header("x-request-id"));
  request.peer = peer_;
  head_only_ = request.method == "HEAD";
  ++num_requests_;
  state_ = State::kAnswering;
  exchange_ = std::make_shared<ServedExchange>(std::move(request), parser_->TakeReservation(),
                                               context_.outbox, context_.options.max_unsent_bytes,
                                               context_.error_body);
  parser_.reset();
  exchange_->connection = this;
  std::shared_ptr<HttpExchange> handle = exchange_->Handle();
  try {
    context_.handler(handle);
  } catch (const std::exception& e) {
    LogWarning(absl::StrFormat("HTTP: request %s: the handler failed: %s",
                               handle->request().request_id, e.what()));
    HttpErrorText text = MakeErrorText(*context_.error_body, 500, "internal error");
    handle->Respond(500, {{"Content-Type", text.content_type}}, std::move(text.body));
  }
  handle.reset();
  Flush();
  if (hang_up_ && state_ == State::kAnswering) Probe();
}

void HttpConnection::FinishResponse() {
  exchange_->connection = nullptr;
  exchange_.reset();
  if (!keep_alive_ || (context_.closing && !has_input())) return Linger();
  StartRequest();
}

void HttpConnection::Refuse(int status, const std::string& message) {
  LogInfo(absl::StrFormat("HTTP: %d to %s: %s", status, peer_, message));
  HttpErrorText text = MakeErrorText(*context_.error_body, status, message);
  const std::string* sent_id = parser_->Header("x-request-id");
  HttpResponseHead head;
  head.status = status;
  head.headers = {{"Content-Type", text.content_type}};
  if (status == 503) head.headers.emplace_back("Retry-After", "1");
  head.length = static_cast<int64_t>(text.body.size());
  head.keep_alive = false;
  std::string response = FormatHead(head, context_.options.common_headers, ChooseRequestId(sent_id),
                                    std::time(nullptr));
  if (parser_->method() != "HEAD") response += text.body;
  state_ = State::kRefusing;
  Queue(std::move(response));
  Send();
}

// Ends the sending side, and reads on for a moment what the client had on its way: closing at once
// would make its system drop the answer unread.
void HttpConnection::Linger() {
  if (end_of_input_) return Close();
  state_ = State::kLingering;
  parser_.reset();
  deadline_ = context_.now + kLingerTime;
  if (shutdown(fd_, SHUT_WR) != 0) Close();
}

void HttpConnection::UpdateInterest() {
  if (state_ == State::kClosed) return;
  uint32_t interest = blocked_ ? EPOLLOUT : 0u;
  if (!hang_up_) interest |= EPOLLRDHUP;
  if (!end_of_input_) {
    const bool held_up =
        state_ == State::kAnswering || (state_ == State::kReading && (sending() || deferred_));
    const auto limit = static_cast<size_t>(context_.options.max_header_bytes);
    if (!held_up || input_.size() < limit) interest |= EPOLLIN;
  }
  if (interest == interest_) return;
  interest_ = interest;
  epoll_event event = {};
  event.events = interest;
  event.data.ptr = static_cast<HttpWatch*>(this);
  if (epoll_ctl(context_.epoll_fd, EPOLL_CTL_MOD, fd_, &event) != 0) Close();
}

// ---- Output -------------------------------------------------------------------------------------

void HttpConnection::Flush() {
  if (state_ != State::kAnswering) return;
  if (exchange_->broken()) {
    LogInfo(absl::StrFormat("HTTP: request %s: the response to %s is broken off%s",
                            exchange_->request().request_id, peer_,
                            exchange_->gone() ? ": the client reads too slowly" : ""));
    return CloseHard();
  }
  if (sending() || deferred_) return;  // comes back here when the client has taken it
  ServedExchange::Output output = exchange_->Take();
  if (output.begins) {
    HttpResponseHead head;
    head.status = output.status;
    head.headers = std::move(output.headers);
    if (HasNoBody(output.status)) {
      head.framing = HttpFraming::kNone;
    } else if (output.whole) {
      head.length = static_cast<int64_t>(output.body.size());
    } else {
      head.framing = http10_ ? HttpFraming::kUntilClose : HttpFraming::kChunked;
    }
    AppendHead(std::move(head));
  }
  complete_ = output.ended;
  AppendBody(std::move(output));
  Send();
}

void HttpConnection::AppendHead(HttpResponseHead head) {
  for (const auto& [name, value] : head.headers) {
    if (SameHeaderName(name, "connection") && ListHolds(value, "close")) keep_alive_ = false;
  }
  const bool last = (context_.closing || end_of_input_) && !has_input();
  if (head.framing == HttpFraming::kUntilClose || last) keep_alive_ = false;
  head.keep_alive = keep_alive_;
  head.http10 = http10_;
  framing_ = head.framing;
  begun_ = true;
  std::string text = FormatHead(head, context_.options.common_headers,
                                exchange_->request().request_id, std::time(nullptr));
  Queue(text.substr(std::exchange(probed_, 0)));
}

void HttpConnection::AppendBody(ServedExchange::Output output) {
  if (head_only_ || framing_ == HttpFraming::kNone) return;
  if (framing_ == HttpFraming::kChunked) {
    AppendChunk(std::move(output.body), output.ended);
  } else if (output.begins && output.body.size() <= kCopiedBytes) {
    queue_.back() += output.body;
    queued_bytes_ += static_cast<int64_t>(output.body.size());
  } else if (!output.body.empty()) {
    Queue(std::move(output.body));
  }
}

void HttpConnection::AppendChunk(std::string body, bool last) {
  constexpr std::string_view kLast = "0\r\n\r\n";
  std::string tail;
  if (!body.empty()) {
    const std::string frame = absl::StrFormat("%x\r\n", body.size());
    if (body.size() <= kCopiedBytes) {
      tail = frame + body;
    } else {
      Queue(frame);
      Queue(std::move(body));
    }
    tail += "\r\n";
  }
  if (last) tail += kLast;
  if (tail.empty()) return;
  probed_ = 0;
  if (begun_ && sending() && queue_.back().size() + tail.size() <= kCopiedBytes) {
    queue_.back() += tail;
    queued_bytes_ += static_cast<int64_t>(tail.size());
  } else {
    Queue(std::move(tail));
  }
}

void HttpConnection::Queue(std::string text) {
  if (!sending()) last_progress_ = context_.now;
  queued_bytes_ += static_cast<int64_t>(text.size());
  queue_.push_back(std::move(text));
}

void HttpConnection::Send() {
  while (sending() || deferred_) {
    std::array<iovec, kMaxVectors> vectors;
    const size_t count = std::min(queue_.size() - next_, vectors.size());
    for (size_t i = 0; i < count; ++i) {
      std::string& text = queue_[next_ + i];
      const size_t skipped = i == 0 ? offset_ : 0;
      vectors[i] = {text.data() + skipped, text.size() - skipped};
    }
    msghdr message = {};
    message.msg_iov = vectors.data();
    message.msg_iovlen = count;
    const ssize_t sent = sendmsg(fd_, &message, MSG_NOSIGNAL);
    if (sent < 0) {
      if (errno == EINTR) continue;
      if (!WouldBlock(errno)) return Close();
      blocked_ = true;
      break;
    }
    last_progress_ = context_.now;
    queued_bytes_ -= sent;
    offset_ += static_cast<size_t>(sent);
    while (sending() && offset_ >= queue_[next_].size()) offset_ -= queue_[next_++].size();
  }
  if (exchange_ != nullptr) exchange_->SetSending(queued_bytes_);
  if (sending() || deferred_) return;
  queue_.clear();
  next_ = offset_ = 0;
  blocked_ = false;
  OnSent();
}

void HttpConnection::OnSent() {
  if (state_ == State::kRefusing) {
    Linger();
  } else if (state_ == State::kAnswering && complete_) {
    FinishResponse();
  }
}

}  // namespace lockstep
