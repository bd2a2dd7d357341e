// The text of HTTP messages: targets, request ids, heads of responses. Pure functions.
#pragma once

#include <cstdint>
#include <ctime>
#include <optional>
#include <string>
#include <string_view>

#include "launch/http/http_server.h"

namespace lockstep {

// Any case of the letters a to z.
bool SameHeaderName(std::string_view a, std::string_view b);
// Whether the comma-separated list `value` holds `token`, any case.
bool ListHolds(std::string_view value, std::string_view token);

struct HttpTarget {
  std::string path;
  std::string query;
};
// RFC 9112, 3.2: "/path?query", "http://host/path?query", or "*" for OPTIONS. Nothing for other
// forms and for a bad percent-encoding.
std::optional<HttpTarget> ParseTarget(std::string_view method, std::string_view target);

// What the client sent, where it is 1 to 128 letters, digits and "-_.:/+=@"; else 32 random hex
// digits.
std::string ChooseRequestId(const std::string* sent);

enum class HttpFraming {
  kLength,      // Content-Length
  kChunked,     // Transfer-Encoding: chunked
  kUntilClose,  // the end of the connection ends the body
  kNone,        // a status that has no body
};

struct HttpResponseHead {
  int status = 200;
  HttpHeaders headers;  // what the answer says
  HttpFraming framing = HttpFraming::kLength;
  int64_t length = 0;  // with kLength
  bool keep_alive = true;
  bool http10 = false;  // what the client speaks
};

// Whether responses of this status never have a body.
bool HasNoBody(int status);

// From "HTTP/1.1 " to the empty line. Control characters in headers become spaces, so that no value
// can end its line.
std::string FormatHead(const HttpResponseHead& head, const HttpHeaders& common_headers,
                       const std::string& request_id, std::time_t now);

// "Sun, 06 Nov 1994 08:49:37 GMT"
std::string HttpDate(std::time_t now);

}  // namespace lockstep
