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

#include "launch/http/http_listener.h"
#include "runtime/core/status.h"

namespace lockstep {

using HttpHeaders = std::vector<std::pair<std::string, std::string>>;

struct HttpRequest {
  std::string method;  // "GET"
  std::string path;    // of the target, without the query, percent-decoded: any bytes
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
// carries x-request-id, Date and Server. Headers about the message's form (Content-Length,
// Transfer-Encoding) are the server's own: what an answer says of them is left out, but for
// "Connection: close". HEAD is answered as GET would be; the body is dropped here.
//
// What comes out of turn does nothing: a second Respond, Write before Begin or after End. So two
// threads may both answer, an engine and a timeout; the first counts. Who lets go of the last
// pointer without an answer lets the client have a 500, or, within a stream, a broken connection.
class HttpExchange {
 public:
  virtual ~HttpExchange() = default;

  virtual const HttpRequest& request() const = 0;

  // The whole response, once. Not counted against max_unsent_bytes.
  virtual void Respond(int status, const HttpHeaders& headers, std::string body) = 0;

  // A response in pieces: Begin, any number of Write, End. Each goes out at once; what gathers
  // while the server's thread is busy goes out together, pieces of several calls in one send. What
  // is not sent yet is kept, up to HttpServerOptions::max_unsent_bytes; beyond it the client reads
  // too slowly: the connection is closed and counts as gone. A client of HTTP/1.0 gets the pieces
  // unframed, and the end of the connection behind them.
  virtual void Begin(int status, const HttpHeaders& headers) = 0;
  virtual void Write(std::string piece) = 0;
  virtual void End() = 0;

  // The client has closed, or its connection was closed because of a limit.
  virtual bool gone() const = 0;
  // `callback` runs once on the server's thread when the client goes before the response has ended;
  // at once (on the caller's thread) when it has gone already. At most one; never after the end,
  // though one that has begun may still run while another thread ends the response. It should not
  // own the exchange.
  //
  // A client that closes is seen at once. One that only ends its sending side (shutdown(SHUT_WR),
  // as nc does) stays: it gets its answer, whole or in pieces. The two look alike, so that the
  // server then sends the first bytes of the answer ahead, one by one: a closed end refuses them.
  // It has none to send ahead for a stream to a client of HTTP/1.0: that one's going shows at the
  // next piece.
  virtual void OnGone(std::function<void()> callback) = 0;
};

struct HttpServerOptions {
  // A name or an address, IPv6 too ("::" takes IPv4 clients as well). A name is listened on at each
  // of its addresses: "localhost" at 127.0.0.1 and ::1, where the machine has them.
  std::string host = "127.0.0.1";
  int port = 8000;                                // 0: any free one
  int64_t max_body_bytes = 32 << 20;              // above it: 413
  int64_t max_header_bytes = 64 << 10;            // of request line and headers; above it: 431
  int64_t max_unsent_bytes = 8 << 20;             // of a response in pieces
  int64_t max_buffered_bytes = int64_t{1} << 30;  // bodies and unsent responses of all connections;
                                                  // above it: 503, and slow readers are closed
  int64_t max_connections = 4096;                 // above it: 503 and close
  // Between requests of a connection; for a request to come, whole; for a client to take any of
  // what is to be sent to it. Behind it: 408 where a request has begun, and close.
  double idle_seconds = 75;
  HttpHeaders common_headers;  // on every response, those the server makes itself too
};

// What the server itself has to answer (malformed, too large, too many connections): the body, as
// JSON, for `status` and what is wrong, so that clients get errors of one form. Called on the
// server's thread, for an exchange nobody answered on the thread that let go of it. Empty: the
// message as plain text.
using HttpErrorBody = std::function<std::string(int status, const std::string& message)>;
// An exception that leaves the handler is logged and answered with 500.
using HttpHandler = std::function<void(std::shared_ptr<HttpExchange>)>;

// Raises the process's limit of open files to what max_connections needs, as far as it may.
class HttpServer {
 public:
  // Binds and listens, and serves from then on. Errors name host, port and the system's reason.
  static absl::StatusOr<std::unique_ptr<HttpServer>> Create(const HttpServerOptions& options,
                                                            HttpHandler handler,
                                                            HttpErrorBody error_body);
  // The same on sockets that listen already; options.host and port do not count. Of a socket there
  // may be copies, in other processes too: of those that accept, any may get a connection.
  static absl::StatusOr<std::unique_ptr<HttpServer>> Create(HttpListeners listeners,
                                                            const HttpServerOptions& options,
                                                            HttpHandler handler,
                                                            HttpErrorBody error_body);
  // Closes every connection and ends the thread. Exchanges may outlive the server. Not from its
  // own thread.
  virtual ~HttpServer() = default;

  virtual int port() const = 0;
  // No new connection; running responses go on, connections close behind them, idle ones at once.
  // Any thread; takes effect a moment later.
  virtual void StopAccepting() = 0;
  // StopAccepting, then waits until what was written is sent and connections are closed, at most
  // `seconds`. Not from the server's own thread.
  virtual void Drain(double seconds) = 0;
  virtual int64_t num_connections() const = 0;
};

}  // namespace lockstep
