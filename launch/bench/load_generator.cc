#include "launch/bench/load_generator.h"

#include <sys/epoll.h>
#include <sys/timerfd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>
#include <deque>
#include <limits>
#include <memory>
#include <utility>

#include "launch/http/http_response_parser.h"

namespace lockstep {

namespace {

using Clock = std::chrono::steady_clock;

constexpr double kNever = std::numeric_limits<double>::infinity();
constexpr int kEventsAtOnce = 256;
constexpr size_t kReadBytes = 64 << 10;
constexpr size_t kErrorBodyBytes = 500;  // of a refusal's body, in messages
constexpr uint64_t kTimerTag = UINT64_MAX;
constexpr uint64_t kStopTag = UINT64_MAX - 1;

// A request while it is open.
struct OpenRequest {
  OpenRequest(OwnedFd connection, const LoadOptions& options)
      : fd(std::move(connection)), stream(options.endpoint, options.keeps_text) {}

  OwnedFd fd;
  bool connected = false;
  size_t num_sent = 0;  // bytes of the message
  HttpResponseParser parser;
  TokenStream stream;
  std::string refusal;  // the body of a status that is not 200
};

class LoadRun {
 public:
  LoadRun(const LoadOptions& options, const std::vector<LoadRequest>& requests,
          const std::function<void(size_t)>& on_end)
      : options_(options), requests_(requests), on_end_(on_end), open_(requests.size()) {
    result_.records.resize(requests.size());
  }

  absl::StatusOr<LoadResult> Run();

 private:
  double Now() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }
  absl::Status SetUp();
  absl::Status Watch(int fd, uint64_t tag);
  void Stop();
  absl::Status SetTimer();
  void StartDue();
  void Start(size_t index);
  void EndLate();
  void OnReady(size_t index, uint32_t events);
  bool SendMore(size_t index);
  void Read(size_t index);
  void TakeBody(size_t index, double now);
  void OnResponseEnd(size_t index, const std::string& cut);
  void End(size_t index, std::string error);

  const LoadOptions& options_;
  const std::vector<LoadRequest>& requests_;
  const std::function<void(size_t)>& on_end_;
  OwnedFd epoll_;
  OwnedFd timer_;
  Clock::time_point start_;
  std::vector<std::unique_ptr<OpenRequest>> open_;  // by request; null: not open
  int64_t num_open_ = 0;
  size_t next_ = 0;     // to start
  size_t num_due_ = 0;  // whose time has come
  size_t num_ended_ = 0;
  std::deque<size_t> by_deadline_;  // as started; those that have ended are still in it
  std::array<char, kReadBytes> buffer_;
  LoadResult result_;
};

absl::Status SystemError(const char* call) {
  return absl::InternalError(absl::StrFormat("%s: %s", call, std::strerror(errno)));
}

absl::Status LoadRun::SetUp() {
  epoll_ = OwnedFd(::epoll_create1(EPOLL_CLOEXEC));
  if (epoll_.get() < 0) return SystemError("epoll_create1");
  timer_ = OwnedFd(::timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC));
  if (timer_.get() < 0) return SystemError("timerfd_create");
  LOCKSTEP_RETURN_IF_ERROR(Watch(timer_.get(), kTimerTag));
  return options_.stop_fd < 0 ? absl::OkStatus() : Watch(options_.stop_fd, kStopTag);
}

absl::Status LoadRun::Watch(int fd, uint64_t tag) {
  epoll_event event = {};
  event.events = EPOLLIN;
  event.data.u64 = tag;
  return ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) == 0 ? absl::OkStatus()
                                                                   : SystemError("epoll_ctl");
}

void LoadRun::Stop() {
  result_.stopped = true;
  for (size_t i = 0; i < next_; ++i) {
    if (open_[i] != nullptr) End(i, "stopped while it was open");
  }
  for (; next_ < requests_.size(); ++next_) {
    result_.records[next_].error = "stopped before it was sent";
    ++num_ended_;
  }
  num_due_ = next_;
  result_.duration = Now();
}

// To the next thing that time brings: an arrival, or the end of a request's time.
absl::Status LoadRun::SetTimer() {
  double at = kNever;
  if (next_ < requests_.size() && num_open_ < options_.max_concurrency) {
    at = requests_[next_].arrival;
  } else if (num_due_ < requests_.size()) {
    at = requests_[num_due_].arrival;
  }
  if (!by_deadline_.empty()) {
    at = std::min(at, *result_.records[by_deadline_.front()].sent + options_.request_seconds);
  }
  itimerspec timer = {};  // all zero: off
  if (at < kNever) {
    const double left = std::max(at - Now(), 0.0);
    timer.it_value.tv_sec = static_cast<time_t>(left);
    timer.it_value.tv_nsec = static_cast<long>((left - std::floor(left)) * 1e9) + 1;
    timer.it_value.tv_nsec = std::min(timer.it_value.tv_nsec, 999999999L);
  }
  return ::timerfd_settime(timer_.get(), 0, &timer, nullptr) == 0 ? absl::OkStatus()
                                                                  : SystemError("timerfd_settime");
}

absl::StatusOr<LoadResult> LoadRun::Run() {
  LOCKSTEP_RETURN_IF_ERROR(SetUp());
  start_ = Clock::now();
  std::array<epoll_event, kEventsAtOnce> events;
  while (true) {
    StartDue();
    EndLate();
    if (num_ended_ == requests_.size()) break;
    LOCKSTEP_RETURN_IF_ERROR(SetTimer());
    const int count = ::epoll_wait(epoll_.get(), events.data(), kEventsAtOnce, -1);
    if (count < 0 && errno != EINTR) return SystemError("epoll_wait");
    for (int i = 0; i < count; ++i) {
      const epoll_event& event = events[static_cast<size_t>(i)];
      if (event.data.u64 == kTimerTag) continue;  // set anew before the next wait
      if (event.data.u64 == kStopTag) {
        Stop();
        break;
      }
      OnReady(static_cast<size_t>(event.data.u64), event.events);
      StartDue();  // many streams must not delay an arrival
    }
  }
  return std::move(result_);
}

void LoadRun::StartDue() {
  const double now = Now();
  while (next_ < requests_.size() && requests_[next_].arrival <= now &&
         num_open_ < options_.max_concurrency) {
    Start(next_++);
  }
  for (; num_due_ < requests_.size() && requests_[num_due_].arrival <= now; ++num_due_) {
    result_.records[num_due_].held = num_due_ >= next_;
  }
}

void LoadRun::Start(size_t index) {
  result_.records[index].sent = Now();
  ++num_open_;
  result_.max_open = std::max(result_.max_open, num_open_);
  Connecting connecting = StartConnecting(options_.server);
  const int fd = connecting.fd.get();
  open_[index] = std::make_unique<OpenRequest>(std::move(connecting.fd), options_);
  epoll_event event = {};
  event.events = EPOLLIN | EPOLLOUT;
  event.data.u64 = index;
  if (connecting.error == 0 && ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
    connecting.error = errno;
  }
  if (connecting.error != 0) {
    return End(index, absl::StrFormat("cannot connect: %s", std::strerror(connecting.error)));
  }
  if (options_.request_seconds > 0) by_deadline_.push_back(index);
}

void LoadRun::EndLate() {
  while (!by_deadline_.empty()) {
    const size_t index = by_deadline_.front();
    if (open_[index] != nullptr) {
      if (Now() < *result_.records[index].sent + options_.request_seconds) return;
      End(index, absl::StrFormat("no end within %g s", options_.request_seconds));
    }
    by_deadline_.pop_front();
  }
}

void LoadRun::OnReady(size_t index, uint32_t events) {
  OpenRequest* const request = open_[index].get();
  if (request == nullptr) return;
  if (!request->connected) {
    if (const int error = ConnectError(request->fd.get()); error != 0) {
      return End(index, absl::StrFormat("cannot connect: %s", std::strerror(error)));
    }
    request->connected = (events & EPOLLOUT) != 0;
  }
  if ((events & EPOLLOUT) != 0 && request->num_sent < requests_[index].message.size() &&
      !SendMore(index)) {
    return;
  }
  if ((events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0) Read(index);
}

// False when the request has ended.
bool LoadRun::SendMore(size_t index) {
  OpenRequest& request = *open_[index];
  const std::string& message = requests_[index].message;
  while (request.num_sent < message.size()) {
    const ssize_t sent = ::send(request.fd.get(), message.data() + request.num_sent,
                                message.size() - request.num_sent, MSG_NOSIGNAL);
    if (sent >= 0) {
      request.num_sent += static_cast<size_t>(sent);
    } else if (errno == EAGAIN) {
      return true;
    } else if (errno != EINTR) {
      // The server may have answered before it closed.
      Read(index);
      if (open_[index] == nullptr) return false;
      End(index, "cannot send: the connection has ended");
      return false;
    }
  }
  epoll_event event = {};
  event.events = EPOLLIN;
  event.data.u64 = index;
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, request.fd.get(), &event);
  return true;
}

void LoadRun::Read(size_t index) {
  OpenRequest& request = *open_[index];
  const ssize_t size = ::recv(request.fd.get(), buffer_.data(), buffer_.size(), 0);
  const double now = Now();
  if (size < 0) {
    if (errno == EAGAIN || errno == EINTR) return;
    return OnResponseEnd(index, absl::StrFormat("the connection broke: %s", std::strerror(errno)));
  }
  const bool fine = size == 0 ? request.parser.FeedEnd()
                              : request.parser.Feed({buffer_.data(), static_cast<size_t>(size)});
  TakeBody(index, now);
  if (!fine) return OnResponseEnd(index, request.parser.error());
  // A server may keep the connection open behind the stream's end, or fill it without one.
  if (request.parser.done() || request.stream.done() || !request.stream.error().empty() ||
      request.refusal.size() >= kErrorBodyBytes) {
    OnResponseEnd(index, "");
  }
}

void LoadRun::TakeBody(size_t index, double now) {
  OpenRequest& request = *open_[index];
  if (!request.parser.header_done()) return;
  result_.records[index].status = request.parser.status();
  const std::string body = request.parser.TakeBody();
  if (request.parser.status() == 200) {
    request.stream.Feed(body, now);
  } else if (request.refusal.size() < kErrorBodyBytes) {
    request.refusal.append(body, 0, kErrorBodyBytes - request.refusal.size());
  }
}

// `cut`: why the response is not whole; empty: it is.
void LoadRun::OnResponseEnd(size_t index, const std::string& cut) {
  OpenRequest& request = *open_[index];
  TokenStream& stream = request.stream;
  stream.FeedEnd(Now());
  if (request.parser.header_done() && request.parser.status() != 200) {
    return End(index, absl::StrFormat("HTTP status %d: %s", request.parser.status(),
                                      request.refusal.empty() ? "no body" : request.refusal));
  }
  if (!stream.error().empty()) return End(index, stream.error());
  // Behind [DONE] nothing is missed.
  if (!cut.empty() && !stream.done()) return End(index, cut);
  if (!stream.finished()) return End(index, "the stream ended without finish_reason and [DONE]");
  End(index, stream.arrivals().empty() ? "the stream brought no token" : "");
}

void LoadRun::End(size_t index, std::string error) {
  const std::unique_ptr<OpenRequest> request = std::move(open_[index]);
  LoadRecord& record = result_.records[index];
  record.error = std::move(error);
  record.arrivals = request->stream.arrivals();
  record.last_event = request->stream.last_event();
  record.prompt_tokens = request->stream.prompt_tokens();
  record.completion_tokens = request->stream.completion_tokens();
  record.text = request->stream.text();
  record.end = result_.duration = Now();
  --num_open_;
  ++num_ended_;
  if (on_end_) on_end_(num_ended_);
}

}  // namespace

absl::StatusOr<LoadResult> RunLoad(const LoadOptions& options,
                                   const std::vector<LoadRequest>& requests,
                                   const std::function<void(size_t)>& on_end) {
  const auto run = std::make_unique<LoadRun>(options, requests, on_end);
  return run->Run();
}

}  // namespace lockstep
