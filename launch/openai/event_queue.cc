#include "launch/openai/event_queue.h"

#include <utility>

namespace lockstep {

void EventQueue::Push(ServingEvent event) {
  bool was_empty;
  {
    const std::lock_guard lock(mutex_);
    was_empty = events_.empty();
    events_.push_back(std::move(event));
  }
  if (was_empty) wake_.notify_one();
}

bool EventQueue::Take(std::optional<ServingClock::time_point> deadline,
                      std::vector<ServingEvent>* events) {
  std::unique_lock lock(mutex_);
  const auto wanted = [this] { return !events_.empty() || stopped_; };
  if (deadline.has_value()) {
    wake_.wait_until(lock, *deadline, wanted);
  } else {
    wake_.wait(lock, wanted);
  }
  events->swap(events_);
  return !events->empty() || !stopped_;
}

void EventQueue::Stop() {
  const std::lock_guard lock(mutex_);
  stopped_ = true;
  wake_.notify_one();
}

}  // namespace lockstep
