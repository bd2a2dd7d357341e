#include "tests/launch/openai/fake_exchange.h"

#include <gtest/gtest.h>

#include <chrono>

namespace lockstep {

void FakeExchange::Respond(int status, const HttpHeaders& headers, std::string body) {
  const std::lock_guard lock(mutex_);
  if (gone_) return;
  EXPECT_FALSE(begun_ || ended_) << "two responses";
  status_ = status;
  headers_ = headers;
  body_ = std::move(body);
  ended_ = true;
  on_gone_ = nullptr;
  changed_.notify_all();
}

void FakeExchange::Begin(int status, const HttpHeaders& headers) {
  const std::lock_guard lock(mutex_);
  if (gone_) return;
  EXPECT_FALSE(begun_ || ended_) << "two responses";
  status_ = status;
  headers_ = headers;
  begun_ = true;
}

void FakeExchange::Write(std::string piece) {
  const std::lock_guard lock(mutex_);
  if (gone_) return;
  EXPECT_TRUE(begun_ && !ended_) << "a piece outside a response";
  EXPECT_FALSE(piece.empty());
  body_ += piece;
  changed_.notify_all();
}

void FakeExchange::End() {
  const std::lock_guard lock(mutex_);
  if (gone_) return;
  EXPECT_TRUE(begun_ && !ended_) << "an end outside a response";
  ended_ = true;
  on_gone_ = nullptr;
  changed_.notify_all();
}

bool FakeExchange::gone() const {
  const std::lock_guard lock(mutex_);
  return gone_;
}

void FakeExchange::OnGone(std::function<void()> callback) {
  {
    const std::lock_guard lock(mutex_);
    if (ended_) return;
    if (!gone_) {
      on_gone_ = std::move(callback);
      return;
    }
  }
  callback();
}

void FakeExchange::Disconnect() {
  std::function<void()> callback;
  {
    const std::lock_guard lock(mutex_);
    gone_ = true;
    std::swap(callback, on_gone_);
  }
  if (callback) callback();
}

bool FakeExchange::WaitForEnd(double seconds) {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, std::chrono::duration<double>(seconds), [this] { return ended_; });
}

void FakeExchange::Wait() { ASSERT_TRUE(WaitForEnd(60)) << "no answer to " << request_.body; }

void FakeExchange::WaitForEvents(size_t count) {
  std::unique_lock lock(mutex_);
  ASSERT_TRUE(changed_.wait_for(lock, std::chrono::seconds(60),
                                [&] { return EventTexts().size() >= count; }));
}

int FakeExchange::status() const {
  const std::lock_guard lock(mutex_);
  return status_;
}

std::string FakeExchange::Header(const std::string& name) const {
  const std::lock_guard lock(mutex_);
  for (const auto& [own, value] : headers_) {
    if (own == name) return value;
  }
  return "";
}

std::string FakeExchange::body() const {
  const std::lock_guard lock(mutex_);
  return body_;
}

Json FakeExchange::json() const {
  const auto json = ParseJson(body(), "the response");
  EXPECT_TRUE(json.ok()) << json.status() << "\n" << body();
  return json.ok() ? *json : Json();
}

std::vector<std::string> FakeExchange::EventTexts() const {
  std::vector<std::string> texts;
  const std::string prefix = "data: ";
  for (size_t at = 0; at < body_.size();) {
    const size_t end = body_.find("\n\n", at);
    if (end == std::string::npos || body_.compare(at, prefix.size(), prefix) != 0) {
      ADD_FAILURE() << "no event: " << body_.substr(at, 200);
      break;
    }
    texts.push_back(body_.substr(at + prefix.size(), end - at - prefix.size()));
    at = end + 2;
  }
  return texts;
}

std::vector<Json> FakeExchange::Events() const {
  const std::lock_guard lock(mutex_);
  std::vector<Json> events;
  for (const std::string& text : EventTexts()) {
    if (text == "[DONE]") {
      events.push_back(text);
      continue;
    }
    const auto json = ParseJson(text, "an event");
    EXPECT_TRUE(json.ok()) << json.status() << "\n" << text;
    events.push_back(json.ok() ? *json : Json());
  }
  return events;
}

}  // namespace lockstep
