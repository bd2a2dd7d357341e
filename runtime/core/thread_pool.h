// The compute threads of one rank.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

namespace lockstep {

// A fixed team of threads; the caller is one of them. Owned by a rank, used from the rank's one
// engine thread: ParallelFor may not be called from two threads at once, nor from inside itself.
class ThreadPool {
 public:
  // num_threads >= 1; 1 starts no thread. Throws std::system_error when the system gives no more
  // threads.
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const;

  // Calls fn(begin, end) for pieces that together are [0, count), each index once, and returns when
  // all are done. Borders of pieces are multiples of `grain`; which thread does which piece, and
  // how many there are, is not said and differs from call to call. count / grain is below 2^31. fn
  // may not throw.
  void ParallelFor(int64_t count, int64_t grain,
                   const std::function<void(int64_t begin, int64_t end)>& fn);

 private:
  struct Team;
  std::unique_ptr<Team> team_;
};

}  // namespace lockstep
