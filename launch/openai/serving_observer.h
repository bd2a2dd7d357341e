// What the API tells about the requests it serves: for metrics.
#pragma once

#include <cstdint>

#include "runtime/request.h"

namespace lockstep {

// A choice that has ended; of n choices each is told.
struct FinishedChoice {
  // kStop for tool calls too, kCancelled when the client has gone, kError when time was up as well.
  FinishReason reason = FinishReason::kNone;
  double seconds = 0;  // since the request arrived
  int64_t prompt_tokens = 0;
  int64_t generated_tokens = 0;
  int32_t n = 1;           // choices of its request
  int64_t max_tokens = 0;  // as asked for, at most what the model's length leaves
};

// Called from the API's own threads and from the HTTP server's, several at once: implementations
// lock or count atomically, and return at once. Times are measured on the engine's thread, where
// tokens come into being.
class ServingObserver {
 public:
  virtual ~ServingObserver() = default;

  // A prompt was given to the engine.
  virtual void OnSubmitted(int64_t prompt_tokens) = 0;
  // It has left the engine's queue: seconds since it was given to the engine.
  virtual void OnAdmitted(double seconds) = 0;
  // A request was answered with this HTTP status instead of being served (400, 401, 404, 429, ...).
  virtual void OnRefused(int http_status) = 0;
  // A choice has its first token: seconds since the request arrived.
  virtual void OnFirstToken(double seconds) = 0;
  // A choice has another token: seconds since the one before.
  virtual void OnNextToken(double seconds) = 0;
  virtual void OnFinished(const FinishedChoice& choice) = 0;
};

}  // namespace lockstep
