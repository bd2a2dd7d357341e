// From the threads where things happen to the responder, which writes answers.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "launch/openai/api_error.h"
#include "launch/openai/open_call.h"

namespace lockstep {

struct ServingEvent {
  enum class Kind {
    kOpened,
    kRefused,    // `error` is the answer
    kSubmitted,  // the call is all the responder's from now on
    kGone,
    kAdmitted,
    kEngineEvent,
    kPromptLogprobs,
    kEndAll,  // with `error`
  };
  Kind kind = Kind::kOpened;
  std::shared_ptr<OpenCall> call = nullptr;
  size_t prompt = 0;
  ServingClock::time_point at = {};
  double seconds = 0;  // in the engine's queue
  RequestEvent engine_event = {};
  std::vector<PositionLogprobs> prompt_logprobs = {};
  std::unique_ptr<ApiError> error = nullptr;
};

// Any number of writers, one reader. Shared with the engine's callbacks, which may outlive the
// reader.
class EventQueue {
 public:
  // Wakes the reader.
  void Push(ServingEvent event);
  // The same, but the reader sleeps on until Announce, or until a good handful has gathered: a step
  // of many requests has an event for each, and waking the reader costs more than an event.
  void PushQuietly(ServingEvent event);
  void Announce();
  // Waits for events, or until `deadline`; puts them into `events`, which is empty before. False
  // when the queue was stopped and holds nothing more.
  bool Take(std::optional<ServingClock::time_point> deadline, std::vector<ServingEvent>* events);
  void Stop();

 private:
  void Add(ServingEvent event, size_t enough);

  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<ServingEvent> events_;
  bool announced_ = false;  // the reader has been woken for them
  bool stopped_ = false;
};

}  // namespace lockstep
