#include "launch/bench/bench_server.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <string_view>
#include <utility>

#include "launch/http/http_response_parser.h"
#include "launch/option_values.h"
#include "runtime/core/json.h"

namespace lockstep {

namespace {

constexpr size_t kMaxBodyBytes = size_t{4} << 20;

using Clock = std::chrono::steady_clock;

Clock::time_point In(double seconds) {
  return Clock::now() +
         std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

// False when `events` do not come until then.
bool WaitFor(int fd, short events, Clock::time_point until) {
  while (true) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now()).count();
    pollfd wait = {fd, events, 0};
    const int ready = ::poll(&wait, 1, static_cast<int>(std::clamp<int64_t>(left, 0, 1 << 30)));
    if (ready > 0) return true;
    if (ready == 0 || errno != EINTR) return false;
  }
}

absl::Status Unavailable(const std::string& why) { return absl::UnavailableError(why); }

// 0, or an errno.
int TryConnect(const SocketAddress& address, Clock::time_point until, OwnedFd* fd) {
  Connecting connecting = StartConnecting(address);
  if (connecting.error != 0) return connecting.error;
  if (!WaitFor(connecting.fd.get(), POLLOUT, until)) return ETIMEDOUT;
  const int error = ConnectError(connecting.fd.get());
  *fd = std::move(connecting.fd);
  return error;
}

absl::Status SendAll(int fd, std::string_view bytes, Clock::time_point until) {
  while (!bytes.empty()) {
    const ssize_t sent = ::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent >= 0) {
      bytes.remove_prefix(static_cast<size_t>(sent));
    } else if (errno == EAGAIN) {
      if (!WaitFor(fd, POLLOUT, until)) return Unavailable("it does not read the request");
    } else if (errno != EINTR) {
      return Unavailable(std::strerror(errno));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<BaseUrl> ParseBaseUrl(const std::string& text) {
  constexpr std::string_view kScheme = "http://";
  if (text.starts_with("https://")) {
    return absl::InvalidArgumentError(
        "https is not spoken here: name the server's http port, or a proxy that speaks TLS to it");
  }
  const absl::Status malformed =
      absl::InvalidArgumentError("it must be http://HOST:PORT, with IPv6 addresses in brackets");
  if (!text.starts_with(kScheme)) return malformed;
  const std::string rest = text.substr(kScheme.size());
  const size_t slash = rest.find('/');
  BaseUrl url;
  url.origin = rest.substr(0, slash);
  if (slash != std::string::npos) url.path = rest.substr(slash);
  while (url.path.ends_with('/')) url.path.pop_back();
  if (url.path.ends_with("/v1")) url.path.resize(url.path.size() - 3);
  const auto has_no_place = [](char c) {
    return static_cast<unsigned char>(c) <= ' ' || c == '\x7f' || c == '?' || c == '#' || c == '@';
  };
  if (std::any_of(text.begin(), text.end(), has_no_place)) return malformed;
  const bool brackets = url.origin.starts_with('[');
  const size_t end = brackets ? url.origin.find(']') : url.origin.find(':');
  if (brackets && end == std::string::npos) return malformed;
  url.host = brackets ? url.origin.substr(1, end - 1) : url.origin.substr(0, end);
  if (url.host.empty()) return malformed;
  const std::string port =
      end == std::string::npos ? "" : url.origin.substr(brackets ? end + 1 : end);
  if (port.empty()) return url;
  const absl::StatusOr<int64_t> number = ParseInt(port.substr(1), 1, 65535);
  if (port[0] != ':' || !number.ok()) return malformed;
  url.port = static_cast<int>(*number);
  return url;
}

absl::StatusOr<SocketAddress> FindServer(const BaseUrl& url, double seconds) {
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* list = nullptr;
  const std::string port = absl::StrCat(url.port);
  if (const int error = ::getaddrinfo(url.host.c_str(), port.c_str(), &hints, &list); error != 0) {
    return Unavailable(absl::StrFormat("cannot reach %s: %s", url.text(), ::gai_strerror(error)));
  }
  const Clock::time_point until = In(seconds);
  int error = 0;
  absl::StatusOr<SocketAddress> found = absl::InternalError("");
  for (const addrinfo* entry = list; entry != nullptr && !found.ok(); entry = entry->ai_next) {
    SocketAddress address;
    std::memcpy(&address.storage, entry->ai_addr, entry->ai_addrlen);
    address.size = entry->ai_addrlen;
    OwnedFd fd;
    const int now = TryConnect(address, until, &fd);
    if (now == 0) found = address;
    if (error == 0) error = now;
  }
  ::freeaddrinfo(list);
  if (found.ok()) return found;
  return Unavailable(absl::StrFormat("cannot reach %s: %s", url.text(), std::strerror(error)));
}

Connecting StartConnecting(const SocketAddress& address) {
  OwnedFd fd(::socket(address.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (fd.get() < 0) return {OwnedFd(), errno};
  const int on = 1;
  ::setsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  const auto* to = reinterpret_cast<const sockaddr*>(&address.storage);
  if (::connect(fd.get(), to, address.size) == 0 || errno == EINPROGRESS) return {std::move(fd), 0};
  return {OwnedFd(), errno};
}

int ConnectError(int fd) {
  int error = 0;
  socklen_t size = sizeof(error);
  return ::getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size) == 0 ? error : errno;
}

std::string FormatHttpRequest(const BaseUrl& url, const std::string& path, const std::string& body,
                              const std::string& api_key) {
  std::string request = absl::StrCat(
      body.empty() ? "GET " : "POST ", url.path, path, " HTTP/1.1\r\nHost: ", url.origin,
      "\r\nUser-Agent: lockstep-bench\r\nAccept: */*\r\nConnection: close\r\n");
  if (!api_key.empty()) absl::StrAppend(&request, "Authorization: Bearer ", api_key, "\r\n");
  if (!body.empty()) {
    absl::StrAppend(&request, "Content-Type: application/json\r\nContent-Length: ", body.size(),
                    "\r\n");
  }
  absl::StrAppend(&request, "\r\n", body);
  return request;
}

absl::StatusOr<HttpAnswer> AskServer(const SocketAddress& address, const std::string& request,
                                     double seconds) {
  const Clock::time_point until = In(seconds);
  OwnedFd fd;
  if (const int error = TryConnect(address, until, &fd); error != 0) {
    return Unavailable(std::strerror(error));
  }
  LOCKSTEP_RETURN_IF_ERROR(SendAll(fd.get(), request, until));
  HttpResponseParser parser;
  HttpAnswer answer;
  std::array<char, 1 << 14> buffer;
  while (!parser.done()) {
    if (!WaitFor(fd.get(), POLLIN, until)) {
      return Unavailable(absl::StrFormat("no answer within %g s", seconds));
    }
    const ssize_t size = ::recv(fd.get(), buffer.data(), buffer.size(), 0);
    if (size < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (size < 0) return Unavailable(std::strerror(errno));
    const bool fine =
        size == 0 ? parser.FeedEnd() : parser.Feed({buffer.data(), static_cast<size_t>(size)});
    if (!fine) return Unavailable(parser.error());
    answer.body += parser.TakeBody();
    if (answer.body.size() > kMaxBodyBytes) return Unavailable("an answer of more than 4 MiB");
  }
  answer.status = parser.status();
  return answer;
}

std::vector<ListedModel> ReadModelList(const std::string& json) {
  const absl::StatusOr<Json> list = ParseJson(json, "the list of models");
  if (!list.ok() || !list->is_object()) return {};
  const auto data = list->find("data");
  if (data == list->end() || !data->is_array()) return {};
  std::vector<ListedModel> models;
  for (const Json& entry : *data) {
    if (!entry.is_object() || !entry.contains("id") || !entry["id"].is_string()) continue;
    ListedModel& model = models.emplace_back();
    model.id = entry["id"].get<std::string>();
    const auto length = entry.find("max_model_len");
    if (length != entry.end() && length->is_number_integer()) {
      const int64_t tokens = length->get<int64_t>();  // above 2^63 it comes out negative
      if (tokens > 0) model.max_model_len = tokens;
    }
  }
  return models;
}

}  // namespace lockstep
