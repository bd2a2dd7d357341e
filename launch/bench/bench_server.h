// The server that is measured: its address, and single questions to it.
#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "launch/http/http_listener.h"
#include "runtime/core/status.h"

namespace lockstep {

// Of "http://HOST[:PORT][/PATH]", IPv6 in brackets; a trailing "/" or "/v1" of the path is dropped,
// so that what clients call base URL can be given as it is.
struct BaseUrl {
  std::string host;
  int port = 80;
  std::string path;    // what stands in front of /v1: empty, or "/proxy"
  std::string origin;  // for messages and the Host header: "127.0.0.1:8000"

  std::string text() const { return "http://" + origin + path; }
};
// InvalidArgument for what is none. https is refused by name.
absl::StatusOr<BaseUrl> ParseBaseUrl(const std::string& text);

struct SocketAddress {
  sockaddr_storage storage = {};
  socklen_t size = 0;
};
// The first of the host's addresses that takes a connection within `seconds`. Unavailable, naming
// the URL and why, when there is none.
absl::StatusOr<SocketAddress> FindServer(const BaseUrl& url, double seconds);

// A socket that does not block, whose connection is under way or stands. Its failure, now or later,
// is an errno.
struct Connecting {
  OwnedFd fd;
  int error = 0;  // 0: under way
};
Connecting StartConnecting(const SocketAddress& address);
// What became of it, once the socket can be written to.
int ConnectError(int fd);

// A whole request. `body` empty: GET, else POST of JSON. `api_key` empty: none is sent. The server
// is asked to close the connection behind its answer.
std::string FormatHttpRequest(const BaseUrl& url, const std::string& path, const std::string& body,
                              const std::string& api_key);

struct HttpAnswer {
  int status = 0;
  std::string body;
};
// Sends one request and waits for the answer. Unavailable when none comes within `seconds`.
absl::StatusOr<HttpAnswer> AskServer(const SocketAddress& address, const std::string& request,
                                     double seconds);

// What GET /v1/models says of one.
struct ListedModel {
  std::string id;
  std::optional<int64_t> max_model_len;
};
// None when the text is no such list.
std::vector<ListedModel> ReadModelList(const std::string& json);

}  // namespace lockstep
