// HTTP/1.1 transport: connections, limits, and responses that may stream. Knows nothing of models.
//
// One thread of the server's own runs all connections. A handler is called on it and must not
// block: it answers at once, or keeps the exchange and answers later from any thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "runtime/core/status.h"

namespace lockstep {

using HttpHeaders = std::vector<std::pair<std::string, std::string>>;

struct HttpRequest {
  std::string method;  // "GET"
  std::string path;    // of the target, without the query, percent-decoded
  std::string query;   // behind '?', as sent
  HttpHeaders headers;
  std::string body;        // whole, at most HttpServerOptions::max_body_bytes
  std::string request_id;  // the client's x-request-id where it is a sane one, else made here
  std::string peer;        // "127.0.0.1:51234"

  // The value of the first header of that name, any case; null without one.
  const std::string* Header(const std::string& name) const;
};

// One request and the response to it. Shared by the server and by who answers; all methods may be
// called from any thread, never block, and do nothing once the client has gone. Each response
// carries x-request-id.
class HttpExchange {
 public:
  virtual ~HttpExchange() = default;

  virtual const HttpRequest& request() const = 0;

  // The whole response, once.
  virtual void Respond(int status, const HttpHeaders& headers, std::string body) = 0;

  // A response in pieces: Begin, any number of Write, End. What is not sent yet is kept, up to
  // HttpServerOptions::max_unsent_bytes; beyond it the client reads too slowly: the connection is
  // closed and counts as gone.
  virtual void Begin(int status, const HttpHeaders& headers) = 0;
  virtual void Write(std::string piece) = 0;
  virtual void End() = 0;

  // The client has closed, or its connection was closed because of a limit.
  virtual bool gone() const = 0;
  // `callback` runs once on the server's thread when the client goes before the response has ended;
  // at once (on the caller's thread) when it has gone already. At most one; never after the end.
  virtual void OnGone(std::function<void()> callback) = 0;
};

struct HttpServerOptions {
  std::string host = "127.0.0.1";  // a name or an address, IPv6 too
  int port = 8000;                 // 0: any free one
  int64_t max_body_bytes = 32 << 20;
  int64_t max_header_bytes = 64 << 10;
  int64_t max_unsent_bytes = 8 << 20;  // of a response
  int64_t max_connections = 4096;      // above it: 503 and close
  double idle_seconds = 75;  // between requests of a connection, and for a request to come
};

// What the server itself has to answer (malformed, too large, too many connections): the body for
// `status` and what is wrong, so that clients get errors of one form.
using HttpErrorBody = std::function<std::string(int status, const std::string& message)>;
using HttpHandler = std::function<void(std::shared_ptr<HttpExchange>)>;

class HttpServer {
 public:
  // Binds and listens, and serves from then on. Errors name host, port and the system's reason.
  static absl::StatusOr<std::unique_ptr<HttpServer>> Create(const HttpServerOptions& options,
                                                            HttpHandler handler,
                                                            HttpErrorBody error_body);
  // Closes every connection and ends the thread. Exchanges may outlive the server.
  virtual ~HttpServer() = default;

  virtual int port() const = 0;
  // No new connection; running responses go on, connections close behind them.
  virtual void StopAccepting() = 0;
  // Waits until what was written is sent and connections are closed, at most `seconds`.
  virtual void Drain(double seconds) = 0;
  virtual int64_t num_connections() const = 0;
};

}  // namespace lockstep
