// One client: its requests in turn, and what is sent to it. Everything here runs on the server's
// thread and none of it blocks.
#pragma once

#include <sys/epoll.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "launch/http/http_exchange.h"
#include "launch/http/http_message.h"
#include "launch/http/http_request_parser.h"
#include "launch/http/http_server.h"

namespace lockstep {

using HttpClock = std::chrono::steady_clock;

// What epoll has something to say about.
class HttpWatch {
 public:
  virtual ~HttpWatch() = default;
  virtual void OnEvents(uint32_t events) = 0;
  // An exception left it: no memory, most likely.
  virtual void OnFailure() {}
};

// What the connections of a server share.
struct HttpContext {
  HttpServerOptions options;
  HttpHandler handler;
  std::shared_ptr<const HttpErrorBody> error_body;
  std::shared_ptr<HttpOutbox> outbox;
  int epoll_fd = -1;
  HttpClock::time_point now;            // of this round of the loop
  bool closing = false;                 // connections close behind their responses
  std::vector<char> scratch;            // for reading
  std::vector<HttpConnection*> ready;   // have more input to go on with in the next round
  std::vector<HttpConnection*> closed;  // to be deleted at the end of the round
};

class HttpConnection final : public HttpWatch {
 public:
  // Takes `fd`, a non-blocking socket.
  HttpConnection(int fd, std::string peer, HttpContext& context);
  ~HttpConnection() override;
  HttpConnection(const HttpConnection&) = delete;
  HttpConnection& operator=(const HttpConnection&) = delete;

  // Once, before all else. With `refused` the first and only answer is 503.
  void Start(bool refused);
  void OnEvents(uint32_t events) override;
  void OnFailure() override { Close(); }
  // The exchange has something to send.
  void OnOutput();
  // Goes on with requests that came with an earlier one.
  void OnReady();
  // Limits of time; several times a second.
  void OnTick();
  // The server takes no more requests: ends an idle connection.
  void OnClosing();
  // Tells who answers that the client has gone. The object lives to the end of the round.
  void Close();

 private:
  enum class State {
    kReading,    // for a request
    kAnswering,  // a handler has one
    kRefusing,   // the server's own last answer is on its way
    kLingering,  // all is sent; until the client closes, too
    kClosed,
  };

  void Read();
  void OnHangUp();
  void ParseInput();
  void DropParsedInput();
  void SendContinue();
  void StartExchange();
  void StartRequest();
  void FinishResponse();
  void Refuse(int status, const std::string& message);
  void Linger();
  void CloseHard();
  // The first bytes of what will be sent anyway, at a client that has ended its sending side.
  void Probe();

  void Flush();
  void AppendHead(HttpResponseHead head);
  void AppendBody(ServedExchange::Output output);
  void AppendChunk(std::string body, bool last);
  void Queue(std::string text);
  // Sends what is queued as far as the client takes it.
  void Send();
  void OnSent();
  void UpdateInterest();

  bool has_input() const { return parsed_ < input_.size(); }
  bool sending() const { return next_ < queue_.size(); }

  const int fd_;
  const std::string peer_;
  HttpContext& context_;
  State state_ = State::kReading;
  uint32_t interest_ = 0;
  HttpClock::time_point deadline_;  // kReading and kLingering

  // Input.
  std::string input_;
  size_t parsed_ = 0;  // of input_
  std::unique_ptr<HttpRequestParser> parser_;
  bool deferred_ = false;      // requests in input_ wait for the next round
  bool in_ready_ = false;      // of the context
  bool receiving_ = false;     // some of the next request has come
  bool hang_up_ = false;       // the client has ended its sending side; some may be left to read
  bool end_of_input_ = false;  // all of it was read
  int64_t num_requests_ = 0;

  // The request being answered.
  std::shared_ptr<ServedExchange> exchange_;
  bool http10_ = false;
  bool head_only_ = false;
  bool keep_alive_ = false;
  HttpFraming framing_ = HttpFraming::kLength;
  bool begun_ = false;     // the head was queued
  bool complete_ = false;  // all was queued
  size_t probed_ = 0;      // bytes of the head, or zeros of the next chunk's size, sent ahead
  HttpClock::time_point last_probe_;

  // Output.
  std::vector<std::string> queue_;
  size_t next_ = 0;    // in queue_
  size_t offset_ = 0;  // in queue_[next_]
  int64_t queued_bytes_ = 0;
  bool blocked_ = false;  // the socket takes no more
  HttpClock::time_point last_progress_;
};

}  // namespace lockstep
