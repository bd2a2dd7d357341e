// The engine of one rank: model, KV pool, and the loop that turns requests into steps.
//
// Rank 0 schedules and broadcasts each step's plan; the others follow. See runtime/README.md for
// ownership and invariants.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "model/checkpoint/checkpoint.h"
#include "parallel/communicator.h"
#include "parallel/partition.h"
#include "runtime/core/phase_times.h"
#include "runtime/request.h"
#include "runtime/scheduler_stats.h"

namespace lockstep {

struct WatchedRank;

// kAuto: CUDA where every rank sees a GPU, else the CPU.
enum class DeviceKind { kAuto, kCpu, kCuda };

struct EngineOptions {
  DeviceKind device = DeviceKind::kCpu;
  DType dtype = DType::kF32;
  std::optional<DType> kv_cache_dtype = std::nullopt;  // none: dtype
  DType kv_dtype() const { return kv_cache_dtype.value_or(dtype); }
  int64_t max_model_len =
      0;  // 0: the model's max_position_embeddings, or what the KV memory holds if that is less
  int64_t max_num_seqs = 256;             // choices that run at once
  int64_t max_num_batched_tokens = 2048;  // of a step
  int64_t block_size = 16;
  // CPU: of a host, shared by its ranks; CUDA: of a GPU. 0: see kv_budget.h.
  int64_t kv_cache_memory_bytes = 0;
  double gpu_memory_utilization = 0.9;  // of a GPU's memory, weights and all; (0, 1]
  bool cuda_graphs = true;              // decode steps are replayed as CUDA graphs
  // CUDA, several ranks: in steps of so many tokens or more, at least 2, sums over ranks run beside
  // products (model/cuda_overlap.h); 0: in none. A product in two parts has one more wave of tiles
  // that does not fill the GPU. By a count of tiles, not measured: at 1024 rows of 3584 these waves
  // take about what the sums take that they hide, at 2048 half of it.
  int64_t overlap_min_tokens = 2048;
  // Multiprocessors of such sums: they take so many, and the products leave them so many; NCCL
  // takes no more in any step. 0: kSumMultiprocessors (engine.cc), and NCCL takes what it chooses.
  int sum_multiprocessors = 0;
  int64_t num_gpu_blocks_override = 0;  // 0: what the memory holds; else this many KV blocks
  bool enable_prefix_caching = true;
  int num_threads = 1;            // compute threads of this rank
  std::string attention_backend;  // "" : the first that fits

  // Steps that are planned and sent before the result of the first of them is known, 1 or 2. 0: 2
  // on CUDA, which computes while the host plans, 1 on the CPU.
  int steps_in_flight = 0;
  // An idle engine tells the other ranks so often that it is alive.
  double heartbeat_seconds = 1;

  // Where this rank shows how far it has come, and its links to other ranks' GPUs, to a watch of
  // the job (parallel/rank_links.h, rank_watch.h). It outlives the engine; null: to nobody.
  WatchedRank* watched = nullptr;

  // One rank of more, measured alone (parallel/partition.h). Prompts are not scored then.
  EmulatedRank emulated;

  // The engine without arithmetic (model/null_decoder.h), on the CPU: no weight is read.
  bool null_model = false;
  double null_step_seconds = 0;  // from the beginning of a step to that of the next, at least

  // Debugging aids.
  bool poison_freed_blocks = false;  // fills freed KV blocks with NaN, on every rank
  int64_t check_tp_steps = 0;  // so many first steps are compared with one rank's (tp_check.h)
  // Every step's attention is compared (checked_backend.h; on CUDA cuda_attention_check.h).
  bool check_attention = false;
  std::string step_log;  // path: rank 0 writes a JSON line a step (step_log.h)
};

// Where rank 0's engine thread has spent its time since the start, in seconds.
struct StepPhaseSeconds {
  double plan = 0;       // the scheduler picks rows and blocks
  double broadcast = 0;  // the plan goes to the other ranks
  double launch = 0;     // on the CPU all of the step's work, on a device its issue
  double land = 0;       // waiting for the oldest step's tokens
  double deliver = 0;    // events go to the callbacks, what has ended is freed
};

// Since the start.
struct EngineStats {
  double load_seconds = 0;
  int64_t prompt_tokens = 0;  // computed in prefill, again after a preemption
  int64_t generated_tokens = 0;
  double prefill_seconds = 0;  // steps that hold prompt tokens
  double decode_seconds = 0;   // steps of decode tokens alone
  int64_t decode_tokens = 0;   // tokens produced by those
  int64_t steps = 0;
  StepPhaseSeconds phases;   // rank 0
  SchedulerStats scheduler;  // rank 0
};

// Thread rule: one thread a rank makes the engine, runs it and destroys it, and it alone uses the
// Communicator. Submit, Cancel, RequestStop and stats may be called from any thread of rank 0, also
// from callbacks.
class Engine {
 public:
  virtual ~Engine() = default;

  // COLLECTIVE. Loads this rank's shard and makes the pool; on failure all ranks get the same
  // status. `source` must be the same on all ranks (each opened it itself) and outlive the engine.
  // `times`, where given, gets what each phase took.
  static absl::StatusOr<std::unique_ptr<Engine>> Create(const ModelSource& source,
                                                        const EngineOptions& options,
                                                        Communicator& communicator,
                                                        PhaseTimes* times = nullptr);

  // The limit in force: prompt + generated tokens of a request.
  virtual int64_t max_model_len() const = 0;

  // Rank 0. InvalidArgument, before any work, for an empty prompt, an id outside the vocabulary,
  // bad sampling parameters, or a prompt that leaves no room for one token in max_model_len (both
  // numbers in the message). Events arrive through the request's callbacks, on the thread that
  // runs the engine.
  virtual absl::StatusOr<RequestId> Submit(Request request) = 0;
  // Rank 0. Ends what is left of the request, before the next step: its choices get one final event
  // (kCancelled). Does nothing for a request that has ended or never was.
  virtual void Cancel(RequestId id) = 0;

  // Rank 0, before Run. `callback` is called on the engine's thread whenever the events of a step,
  // or of cancellations, have gone to the requests' callbacks: who gathers them acts then. One
  // callback; a later one takes its place.
  virtual void OnDelivered(std::function<void()> callback) = 0;

  // Rank 0. Steps until every submitted request has ended.
  virtual absl::Status RunUntilIdle() = 0;
  // Rank 0. Steps, or sleeps while there is nothing to do, until RequestStop; what has not ended
  // then is cancelled.
  virtual absl::Status Run() = 0;
  virtual void RequestStop() = 0;
  // Rank 0. Tells the other ranks to leave Follow. Idempotent.
  virtual absl::Status Stop() = 0;

  // Ranks other than 0: executes plans until Stop.
  virtual absl::Status Follow() = 0;

  // As of the last step. Cheap: may be asked for at any rate, and holds the engine up by the time
  // of a copy.
  virtual EngineStats stats() const = 0;
};

}  // namespace lockstep
