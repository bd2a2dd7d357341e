#include "launch/openai/work_queue.h"

#include <utility>

#include "runtime/core/status.h"

namespace lockstep {

WorkQueue::WorkQueue(int num_threads) {
  LOCKSTEP_CHECK(num_threads >= 2);
  for (int i = 0; i < num_threads; ++i) {
    threads_.emplace_back([this, takes_long = i > 0] { Run(takes_long); });
  }
}

WorkQueue::~WorkQueue() {
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void WorkQueue::Add(std::function<void()> job, bool is_long) {
  {
    const std::lock_guard lock(mutex_);
    (is_long ? long_ : short_).push_back(std::move(job));
  }
  // Whoever wakes up for a long job must be one who takes it.
  if (is_long) {
    wake_.notify_all();
  } else {
    wake_.notify_one();
  }
}

void WorkQueue::Run(bool takes_long) {
  std::unique_lock lock(mutex_);
  while (true) {
    wake_.wait(lock, [&] { return stopped_ || !short_.empty() || (takes_long && !long_.empty()); });
    std::deque<std::function<void()>>& jobs = short_.empty() && takes_long ? long_ : short_;
    if (jobs.empty()) return;  // stopped, and nothing left that is ours
    std::function<void()> job = std::move(jobs.front());
    jobs.pop_front();
    lock.unlock();
    job();
    job = nullptr;
    lock.lock();
  }
}

}  // namespace lockstep
