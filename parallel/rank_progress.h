// What one rank has passed, so that others can tell a long step from a hang: the watch of the job
// (rank_watch.h) compares the ranks' records.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

namespace lockstep {

enum class RankPhase : int32_t { kStart, kLoad, kPrefill, kDecode, kIdle, kEnd };

enum class CollectiveKind : int32_t {
  kNone,
  kAllReduce,
  kAllGather,
  kGather,
  kBroadcast,
  kBarrier,
  kFinalize,  // MPI_Finalize, where all ranks wait for all
};

// A rank's progress at one moment. Ranks send it to each other as it lies in memory.
struct ProgressRecord {
  int64_t step = 0;  // the latest; 0: none has begun
  RankPhase phase = RankPhase::kStart;
  // The rank does what nobody can measure: it waits for work, or for whoever reads its output.
  int32_t paused = 0;
  // Collectives over host memory, which all ranks enter in the same order.
  int64_t entered = 0;
  int64_t passed = 0;
  int64_t entered_in_step = 0;                  // since the step began
  CollectiveKind kind = CollectiveKind::kNone;  // the latest that was entered
  int32_t unused = 0;
  int64_t bytes = 0;   // of it
  int64_t landed = 0;  // steps whose result is there
  // Whatever else shows that work goes on: bytes of weights, steps launched and landed.
  int64_t marks = 0;

  bool in_collective() const { return entered != passed; }
  bool operator==(const ProgressRecord&) const = default;
};

// "in step 57 (decode)", "while loading".
std::string PhaseText(const ProgressRecord& record);
// "collective 13 of the step (sum of 8192 bytes)": the latest that the rank entered.
std::string CollectiveText(const ProgressRecord& record);

// Thread rule: the rank's main thread writes, but for Mark; any thread reads. Costs nanoseconds:
// plain loads and stores of atomics.
class RankProgress {
 public:
  RankProgress() = default;
  RankProgress(const RankProgress&) = delete;
  RankProgress& operator=(const RankProgress&) = delete;

  void SetPhase(RankPhase phase) { Store(phase_, phase); }
  void BeginStep(uint64_t step, RankPhase phase) {
    Store(step_, static_cast<int64_t>(step));
    Store(step_begin_, Load(entered_));
    SetPhase(phase);
    Mark(1);
  }
  void LandStep() {
    Add(landed_, 1);
    Mark(1);
  }
  void Enter(CollectiveKind kind, int64_t bytes) {
    Store(kind_, kind);
    Store(bytes_, bytes);
    Add(entered_, 1);
  }
  void Pass() { Add(passed_, 1); }
  // Any thread.
  void Mark(int64_t amount) { marks_.fetch_add(amount, std::memory_order_relaxed); }

  // Any thread. Fields that change meanwhile may be from before or after.
  ProgressRecord Read() const;

 private:
  friend class ProgressPause;

  template <typename T>
  static T Load(const std::atomic<T>& value) {
    return value.load(std::memory_order_relaxed);
  }
  template <typename T>
  static void Store(std::atomic<T>& value, T to) {
    value.store(to, std::memory_order_relaxed);
  }
  // One thread writes: no atomic addition is needed.
  template <typename T>
  static void Add(std::atomic<T>& value, int amount) {
    Store(value, static_cast<T>(Load(value) + amount));
  }

  std::atomic<int64_t> step_ = 0;
  std::atomic<RankPhase> phase_ = RankPhase::kStart;
  std::atomic<int32_t> paused_ = 0;
  std::atomic<int64_t> entered_ = 0;
  std::atomic<int64_t> passed_ = 0;
  std::atomic<int64_t> step_begin_ = 0;  // entered_ then
  std::atomic<CollectiveKind> kind_ = CollectiveKind::kNone;
  std::atomic<int64_t> bytes_ = 0;
  std::atomic<int64_t> landed_ = 0;
  alignas(64) std::atomic<int64_t> marks_ = 0;
};

// While it lives, the rank is not expected to come further.
class ProgressPause {
 public:
  explicit ProgressPause(RankProgress& progress) : progress_(progress) {
    RankProgress::Add(progress_.paused_, 1);
  }
  ~ProgressPause() { RankProgress::Add(progress_.paused_, -1); }
  ProgressPause(const ProgressPause&) = delete;
  ProgressPause& operator=(const ProgressPause&) = delete;

 private:
  RankProgress& progress_;
};

}  // namespace lockstep
