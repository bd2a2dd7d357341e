// From the bytes of a connection to one request.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "launch/http/http_exchange.h"
#include "launch/http/http_server.h"

namespace lockstep {

struct HttpRequestLimits {
  int64_t header_bytes = 0;
  int64_t body_bytes = 0;
};

// Boost.Beast's parser behind a plain interface, with the checks that Beast leaves to its user.
// Takes HTTP/1.0 and 1.1, bodies with Content-Length or chunked. Trailers are checked and dropped.
class HttpRequestParser {
 public:
  HttpRequestParser(const HttpRequestLimits& limits, HttpReservation body);
  ~HttpRequestParser();

  // Reads what it can of `size` bytes and returns how many those are: the rest must come again,
  // with more behind it. Stops behind the header and behind the request. Not after error_status().
  size_t Feed(const char* data, size_t size);

  bool header_done() const;
  bool done() const;
  // Not 0: no request; the response to give, and why. The connection cannot go on.
  int error_status() const;
  const std::string& error_message() const;

  // Once the header is done, and after an error as far as it came.
  bool http10() const;
  bool keep_alive() const;
  bool expects_continue() const;
  const std::string* Header(const std::string& name) const;
  const std::string& method() const;

  // Once done. The parser cannot be used any more.
  HttpRequest TakeRequest();
  HttpReservation TakeReservation();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace lockstep
