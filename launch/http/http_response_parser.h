// From the bytes of a connection to one response: the client's side.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

namespace lockstep {

// Boost.Beast's parser behind a plain interface. Takes HTTP/1.0 and 1.1, bodies with
// Content-Length, chunked, or up to the end of the connection. For one response that is no answer
// to HEAD.
class HttpResponseParser {
 public:
  HttpResponseParser();
  ~HttpResponseParser();
  HttpResponseParser(HttpResponseParser&&) noexcept;
  HttpResponseParser& operator=(HttpResponseParser&&) noexcept;

  // False when the bytes are no response, now or earlier: error() says why. Bytes behind the end of
  // the response are dropped.
  bool Feed(std::string_view bytes);
  // The connection has ended. False when that cuts the response short.
  bool FeedEnd();

  bool header_done() const;
  bool done() const;
  const std::string& error() const;
  // Once the header is done.
  int status() const;
  // What has come of the body since the last call.
  std::string TakeBody();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace lockstep
