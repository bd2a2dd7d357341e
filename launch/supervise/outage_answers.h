// What clients get while there are no ranks: 503 to everything, with OpenAI's error object and how
// long to wait.
#pragma once

#include <atomic>
#include <chrono>

#include "launch/http/http_server.h"

namespace lockstep {

// Any thread.
class OutageAnswers {
 public:
  using Clock = std::chrono::steady_clock;

  // The ranks are started again then; the model is to be loaded behind it.
  void SetNextStart(Clock::time_point time) { next_start_ = time; }
  // They are not, because somebody has asked the server to stop.
  void SetEnding() { ending_ = true; }

  // Closes the connection, so that the client's next one is the new server's.
  void Answer(HttpExchange& exchange) const;

 private:
  std::atomic<Clock::time_point> next_start_{Clock::time_point()};
  std::atomic<bool> ending_ = false;
};

}  // namespace lockstep
