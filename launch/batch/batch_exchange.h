// An HttpExchange without HTTP: a request of a batch job to launch/openai, and its answer.
#pragma once

#include <functional>
#include <mutex>
#include <string>

#include "launch/http/http_server.h"

namespace lockstep {

// Responses in pieces are for streams, which a batch job never asks for: a bug here.
class BatchExchange : public HttpExchange {
 public:
  using Answer = std::function<void(int status, const std::string& request_id, std::string body)>;

  // POST of `body` to `path`. `answer` is called once, on the thread that answers: with 500 when
  // nobody has by the time the exchange goes.
  BatchExchange(std::string path, std::string body, Answer answer);
  ~BatchExchange() override;

  const HttpRequest& request() const override { return request_; }
  void Respond(int status, const HttpHeaders& headers, std::string body) override;
  void Begin(int status, const HttpHeaders& headers) override;
  void Write(std::string piece) override;
  void End() override;
  bool gone() const override { return false; }
  void OnGone(std::function<void()>) override {}

 private:
  const HttpRequest request_;
  std::mutex mutex_;
  Answer answer_;  // empty once it was called
};

}  // namespace lockstep
