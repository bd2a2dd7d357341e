// Static scales of an fp8 KV cache: numbers are stored divided by them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cache/kv_pool.h"
#include "model/checkpoint/checkpoint.h"

namespace lockstep {

struct KvScales {
  std::vector<float> keys;    // [L]
  std::vector<float> values;  // [L]
  int64_t num_read = 0;       // of these 2 * L; the checkpoint has no others, they are 1

  // For the log.
  std::string ToString() const;
  // `pool` has L layers of kF8E4M3.
  void ApplyTo(KvPool& pool) const;
};

// Of each layer, self_attn.k_scale and v_scale, or those of self_attn.attn: one element each.
// InvalidArgument, naming the tensor, for another shape or a scale that is not positive and finite;
// else Checkpoint::Read's errors.
absl::StatusOr<KvScales> ReadKvScales(const Checkpoint& checkpoint, int64_t num_layers);

}  // namespace lockstep
