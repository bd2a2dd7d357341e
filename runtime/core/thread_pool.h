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

  // Calls fn(begin, end) for consecutive pieces of [0, count) and returns when all are done. The
  // pieces are a static split into num_threads near-equal parts whose borders are multiples of
  // `grain`; a piece may be empty and is then skipped. fn may not throw.
  void ParallelFor(int64_t count, int64_t grain,
                   const std::function<void(int64_t begin, int64_t end)>& fn);

 private:
  struct Team;
  std::unique_ptr<Team> team_;
};

}  // namespace lockstep
