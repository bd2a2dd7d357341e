// Threads that do what may take long, with a way past for what does not.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace lockstep {

// Any thread may add work. Long jobs keep one thread free for short ones.
class WorkQueue {
 public:
  // At least 2 threads.
  explicit WorkQueue(int num_threads);
  // Does what is queued, then ends.
  ~WorkQueue();

  void Add(std::function<void()> job, bool is_long);

 private:
  void Run(bool takes_long);

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> short_;
  std::deque<std::function<void()>> long_;
  bool stopped_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace lockstep
