// An HttpExchange without a network: records the response, and can go away.
#pragma once

#include <condition_variable>
#include <mutex>
#include <string>
#include <vector>

#include "launch/http/http_server.h"
#include "runtime/core/json.h"

namespace lockstep {

class FakeExchange : public HttpExchange {
 public:
  explicit FakeExchange(HttpRequest request) : request_(std::move(request)) {}

  const HttpRequest& request() const override { return request_; }
  void Respond(int status, const HttpHeaders& headers, std::string body) override;
  void Begin(int status, const HttpHeaders& headers) override;
  void Write(std::string piece) override;
  void End() override;
  bool gone() const override;
  void OnGone(std::function<void()> callback) override;

  // The client closes its connection.
  void Disconnect();

  // Waits for the end of the response; a test failure after a minute.
  void Wait();
  // Waits until so many events of a stream have been written.
  void WaitForEvents(size_t count);
  bool WaitForEnd(double seconds);

  // After Wait.
  int status() const;
  std::string Header(const std::string& name) const;
  std::string body() const;
  Json json() const;  // of a response that is no stream
  // Of a stream: what stands behind "data: ", in order; [DONE] is a string. A test failure when the
  // framing is wrong.
  std::vector<Json> Events() const;

 private:
  std::vector<std::string> EventTexts() const;  // under mutex_

  const HttpRequest request_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  int status_ = 0;
  HttpHeaders headers_;
  std::string body_;
  bool begun_ = false;
  bool ended_ = false;
  bool gone_ = false;
  std::function<void()> on_gone_;
};

}  // namespace lockstep
