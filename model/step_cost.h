// What a step of the decoder moves and computes on one rank, counted from the model's shape: bytes
// and operations, no times. Tests and predictions divide these by a device's rates.
#pragma once

#include <cstdint>

#include "model/model_config.h"
#include "parallel/partition.h"

namespace lockstep {

// B requests alike: each computes `query_len` tokens, the last of its `seq_len`.
struct UniformBatch {
  int64_t requests = 1;
  int64_t query_len = 1;
  int64_t seq_len = 1;  // query_len or more

  int64_t num_tokens() const { return requests * query_len; }  // T
};

// Doubles: a step of many long prompts passes 2^63 operations on no machine of today, but a table
// of predictions asks for what it likes.
struct StepCost {
  double weight_bytes = 0;     // of products, each read once; of the embedding nothing
  double kv_bytes = 0;         // keys and values that attention reads, each once
  double product_flops = 0;    // 2 * rows * weights; the head for one row a request
  double attention_flops = 0;  // 4 * D a visible (query, key) pair and query head
  int64_t num_sums = 0;        // all-reduces over ranks, 2 L + 1; none on one rank
  double sum_bytes = 0;        // of each: T * E in the activations' dtype
};

// Sliding windows count: a layer reads and multiplies what its queries see.
StepCost CostOfStep(const ModelConfig& config, const RankPartition& part, int tp_size, DType dtype,
                    DType kv_dtype, const UniformBatch& batch);

}  // namespace lockstep
