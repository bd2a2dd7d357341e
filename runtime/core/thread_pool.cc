#include "runtime/core/thread_pool.h"

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

#include "runtime/core/status.h"

namespace lockstep {

namespace {

void CpuRelax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// A step has hundreds of short parallel regions with little between them, so a worker spins a
// little (some 20 us) before it sleeps on the atomic (a futex); long spins would starve other ranks
// that share the cores.
constexpr int kSpins = 1000;

// The rest of a job is cut for twice as many threads as there are: pieces get smaller as it ends.
constexpr uint32_t kShare = 2;

constexpr uint32_t kStop = uint32_t{1} << 31;

template <typename Done>
uint32_t SpinThenWait(std::atomic<uint32_t>& word, Done done) {
  for (int spin = 0;; ++spin) {
    const uint32_t seen = word.load(std::memory_order_acquire);
    if (done(seen)) return seen;
    if (spin < kSpins) {
      CpuRelax();
    } else {
      word.wait(seen, std::memory_order_acquire);
    }
  }
}

}  // namespace

// A job is a number of grains. Whoever is free takes the next ones, so a thread that the system
// keeps off its core (other processes, more ranks than cores) delays the job by the piece it has,
// and one that wakes up late finds nothing to do and holds nobody up.
//
// The job's fields are plain: they are written while `unclaimed` is 0, and read only by a thread
// that has just taken grains from it, which keeps the job from ending.
struct ThreadPool::Team {
  std::vector<std::thread> threads;
  alignas(64) std::atomic<uint32_t> unclaimed{0};   // grains nobody has taken; kStop: go home
  alignas(64) std::atomic<uint32_t> unfinished{0};  // grains not done
  alignas(64) int64_t count = 0;
  int64_t grain = 1;
  uint32_t grains = 0;
  uint32_t size = 1;
  const std::function<void(int64_t, int64_t)>* fn = nullptr;

  // Here and not in ~ThreadPool: a constructor that could not start its last thread ends the
  // others.
  ~Team() {
    unclaimed.store(kStop, std::memory_order_release);
    unclaimed.notify_all();
    for (std::thread& thread : threads) thread.join();
  }

  // Takes grains and does them until none is left. Returns with nothing of this thread unfinished.
  void Help() {
    uint32_t left = unclaimed.load(std::memory_order_acquire);
    while (left != 0 && left != kStop) {
      const uint32_t take = (left + kShare * size - 1) / (kShare * size);
      if (!unclaimed.compare_exchange_weak(left, left - take, std::memory_order_acq_rel)) continue;
      const int64_t begin = static_cast<int64_t>(grains - left) * grain;
      (*fn)(begin, std::min(count, begin + take * grain));
      if (unfinished.fetch_sub(take, std::memory_order_acq_rel) == take) unfinished.notify_one();
      left = unclaimed.load(std::memory_order_acquire);
    }
  }

  void Work() {
    while (SpinThenWait(unclaimed, [](uint32_t left) { return left != 0; }) != kStop) Help();
  }
};

ThreadPool::ThreadPool(int num_threads) : team_(std::make_unique<Team>()) {
  LOCKSTEP_CHECK(num_threads >= 1);
  team_->size = static_cast<uint32_t>(num_threads);
  for (int i = 1; i < num_threads; ++i) {
    team_->threads.emplace_back([team = team_.get()] { team->Work(); });
  }
}

ThreadPool::~ThreadPool() = default;

int ThreadPool::num_threads() const { return static_cast<int>(team_->size); }

void ThreadPool::ParallelFor(int64_t count, int64_t grain,
                             const std::function<void(int64_t, int64_t)>& fn) {
  Team& team = *team_;
  if (count <= 0) return;
  if (team.size == 1 || count <= grain) {
    fn(0, count);
    return;
  }
  const int64_t grains = (count + grain - 1) / grain;
  LOCKSTEP_CHECK(grains < int64_t{kStop});
  team.count = count;
  team.grain = grain;
  team.fn = &fn;
  team.grains = static_cast<uint32_t>(grains);
  team.unfinished.store(team.grains, std::memory_order_relaxed);
  team.unclaimed.store(team.grains, std::memory_order_release);
  team.unclaimed.notify_all();
  team.Help();
  SpinThenWait(team.unfinished, [](uint32_t left) { return left == 0; });
}

}  // namespace lockstep
