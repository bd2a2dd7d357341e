#include "launch/openai/event_queue.h"

#include <utility>

namespace lockstep {

namespace {

// The reader works beside a step's writer from so many events on.
constexpr size_t kHandful = 64;

}  // namespace

void EventQueue::Push(ServingEvent event) { Add(std::move(event), 1); }

void EventQueue::PushQuietly(ServingEvent event) { Add(std::move(event), kHandful); }

void EventQueue::Add(ServingEvent event, size_t enough) {
  {
    const std::lock_guard lock(mutex_);
    events_.push_back(std::move(event));
    if (announced_ || events_.size() < enough) return;
    announced_ = true;
  }
  wake_.notify_one();
}

void EventQueue::Announce() {
  {
    const std::lock_guard lock(mutex_);
    if (announced_ || events_.empty()) return;
    announced_ = true;
  }
  wake_.notify_one();
}

bool EventQueue::Take(std::optional<ServingClock::time_point> deadline,
                      std::vector<ServingEvent>* events) {
  std::unique_lock lock(mutex_);
  const auto wanted = [this] { return announced_ || stopped_; };
  if (deadline.has_value()) {
    wake_.wait_until(lock, *deadline, wanted);
  } else {
    wake_.wait(lock, wanted);
  }
  events->swap(events_);
  announced_ = false;
  return !events->empty() || !stopped_;
}

void EventQueue::Stop() {
  const std::lock_guard lock(mutex_);
  stopped_ = true;
  wake_.notify_one();
}

}  // namespace lockstep
