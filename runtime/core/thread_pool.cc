#include "runtime/core/thread_pool.h"

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

#include "runtime/core/status.h"

namespace lockstep {

namespace {
// A step has hundreds of short parallel regions, so a worker spins a little before it sleeps on the
// atomic (a futex); long spins would starve other ranks that share the cores.
constexpr int kSpins = 2000;

template <typename Done>
void SpinThenWait(std::atomic<uint32_t>& word, Done done) {
  for (int spin = 0;; ++spin) {
    const uint32_t seen = word.load(std::memory_order_acquire);
    if (done(seen)) return;
    if (spin < kSpins) {
      __builtin_ia32_pause();
    } else {
      word.wait(seen, std::memory_order_acquire);
    }
  }
}
}  // namespace

struct ThreadPool::Team {
  std::vector<std::thread> threads;
  std::atomic<uint32_t> generation{0};  // raised once per job, and once to stop
  std::atomic<uint32_t> pending{0};     // workers that have not finished the job
  bool stop = false;
  int64_t count = 0;
  int64_t grain = 1;
  int size = 1;
  const std::function<void(int64_t, int64_t)>* fn = nullptr;

  // Here and not in ~ThreadPool: a constructor that could not start its last thread ends the
  // others.
  ~Team() {
    stop = true;
    generation.fetch_add(1, std::memory_order_release);
    generation.notify_all();
    for (std::thread& thread : threads) thread.join();
  }

  void RunPart(int part) const {
    const int64_t grains = (count + grain - 1) / grain;
    const int64_t begin = std::min(count, grains * part / size * grain);
    const int64_t end = std::min(count, grains * (part + 1) / size * grain);
    if (begin < end) (*fn)(begin, end);
  }

  void Work(int part) {
    for (uint32_t seen = 0;;) {
      SpinThenWait(generation, [&](uint32_t now) { return now != seen; });
      ++seen;
      if (stop) return;
      RunPart(part);
      if (pending.fetch_sub(1, std::memory_order_acq_rel) == 1) pending.notify_one();
    }
  }
};

ThreadPool::ThreadPool(int num_threads) : team_(std::make_unique<Team>()) {
  LOCKSTEP_CHECK(num_threads >= 1);
  team_->size = num_threads;
  for (int part = 1; part < num_threads; ++part) {
    team_->threads.emplace_back([team = team_.get(), part] { team->Work(part); });
  }
}

ThreadPool::~ThreadPool() = default;

int ThreadPool::num_threads() const { return team_->size; }

void ThreadPool::ParallelFor(int64_t count, int64_t grain,
                             const std::function<void(int64_t, int64_t)>& fn) {
  Team& team = *team_;
  if (count <= 0) return;
  if (team.size == 1 || count <= grain) {
    fn(0, count);
    return;
  }
  team.count = count;
  team.grain = grain;
  team.fn = &fn;
  team.pending.store(static_cast<uint32_t>(team.size - 1), std::memory_order_relaxed);
  team.generation.fetch_add(1, std::memory_order_release);
  team.generation.notify_all();
  team.RunPart(0);
  SpinThenWait(team.pending, [](uint32_t left) { return left == 0; });
}

}  // namespace lockstep
