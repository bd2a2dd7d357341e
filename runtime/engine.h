// The engine of one rank: model, KV pool, and the loop that turns requests into steps.
//
// Rank 0 schedules and broadcasts each step's plan; the others follow. See runtime/README.md for
// ownership and invariants.
#pragma once

#include <cstdint>
#include <memory>

#include "model/checkpoint/checkpoint.h"
#include "parallel/communicator.h"
#include "runtime/request.h"

namespace lockstep {

struct EngineOptions {
  DType dtype = DType::kF32;
  int64_t max_model_len =
      0;  // 0: the model's max_position_embeddings, or what the KV memory holds if that is less
  int64_t max_num_seqs = 256;
  int64_t max_num_batched_tokens = 2048;
  int64_t block_size = 16;
  int64_t kv_cache_memory_bytes = 0;  // a rank; 0: enough for one sequence of max_model_len, within
                                      // a quarter of the host's free memory
  int num_threads = 1;                // compute threads of this rank
  std::string attention_backend;      // "" : the first that fits
};

struct EngineStats {
  double load_seconds = 0;
  int64_t prompt_tokens = 0;  // computed in prefill
  int64_t generated_tokens = 0;
  double prefill_seconds = 0;  // steps that hold prompt tokens
  double decode_seconds = 0;   // steps of decode tokens alone
  int64_t decode_tokens = 0;   // tokens produced by those
  int64_t steps = 0;
};

class Engine {
 public:
  virtual ~Engine() = default;

  // COLLECTIVE. Loads this rank's shard and makes the pool; on failure all ranks get the same
  // status. `source` must be the same on all ranks (each opened it itself) and outlive the engine.
  static absl::StatusOr<std::unique_ptr<Engine>> Create(const ModelSource& source,
                                                        const EngineOptions& options,
                                                        Communicator& communicator);

  // The limit in force: prompt + generated tokens of a request.
  virtual int64_t max_model_len() const = 0;

  // Rank 0. InvalidArgument, before any work, for an empty prompt, an id outside the vocabulary,
  // bad sampling parameters, or a prompt that leaves no room for one token in max_model_len (both
  // numbers in the message).
  virtual absl::StatusOr<RequestId> Submit(Request request) = 0;
  // Rank 0. Steps until every submitted request has ended. Events arrive through Request::on_event.
  virtual absl::Status RunUntilIdle() = 0;
  // Rank 0. Tells the other ranks to leave Follow. Idempotent.
  virtual absl::Status Stop() = 0;

  // Ranks other than 0: executes plans until Stop.
  virtual absl::Status Follow() = 0;

  virtual const EngineStats& stats() const = 0;
};

}  // namespace lockstep
