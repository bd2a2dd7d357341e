// The contract between the model's attention layers and an attention implementation over paged KV.
//
// A backend says what it can do as data; the selector (attention/selector.h) compares a request
// with that at load time. Cache write and attention are separate calls. Metadata is built once a
// step and shared by all layers.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "attention/attention_batch.h"
#include "cache/kv_view.h"
#include "runtime/core/buffer.h"
#include "runtime/core/range.h"
#include "runtime/core/status.h"

namespace lockstep {

enum class GraphSupport { kNever, kUniformSingleTokenDecode, kUniformBatch, kAlways };

struct AttentionCapabilities {
  std::vector<DType> activation_dtypes;
  std::vector<DType> kv_dtypes;
  // No other pairs of the two, but for a kF8E4M3 cache, which goes with all.
  bool activations_in_kv_dtype = false;
  int64_t min_head_dim = 1;
  int64_t max_head_dim = 0;
  int64_t head_dim_multiple = 1;
  int64_t block_size_multiple = 1;
  bool sliding_window = false;
  bool logit_softcap = false;
  bool alibi = false;
  bool sinks = false;
  bool non_causal = false;
  bool returns_log_sum_exp = false;
  bool deterministic = false;  // the same bits whatever else is in the batch
  GraphSupport graph_support = GraphSupport::kNever;
};

// One layer's attention on this rank; heads are local.
struct AttentionGeometry {
  int64_t num_query_heads = 0;   // Hq_local
  int64_t num_kv_heads = 0;      // Hkv_local
  int64_t head_dim = 0;          // D
  std::vector<Range> kv_groups;  // [Hkv_local] local query heads of each local KV head, ragged
  float scale = 0;               // of the logits, usually 1 / sqrt(D)
  int64_t sliding_window =
      0;                    // a query sees the last `sliding_window` keys, itself included; 0: all
  float logit_softcap = 0;  // logits become c * tanh(logits / c); 0: none
};

// What the backend's kernels want of a step. Made by the backend, opaque to others. Refers to the
// AttentionBatch it was made from.
class AttentionMetadata {
 public:
  virtual ~AttentionMetadata() = default;
};

class AttentionBackend {
 public:
  virtual ~AttentionBackend() = default;

  virtual std::string name() const = 0;
  virtual const AttentionCapabilities& capabilities() const = 0;

  // Once a step. InvalidArgument when the batch contradicts itself (lengths, a table too short): a
  // bug of the caller, told by name.
  virtual absl::StatusOr<std::unique_ptr<AttentionMetadata>> BuildMetadata(
      const AttentionBatch& batch, int64_t block_size) const = 0;

  // Writes row t of keys and values, each [T, Hkv_local * D] float32 (divided by the cache's scale
  // and converted to its dtype, nearest-even), to slot slots[t]; kNoSlot writes nothing.
  virtual void WriteKv(const MatrixView& keys, const MatrixView& values,
                       std::span<const int64_t> slots, const KvCacheView& cache) const = 0;

  // Causal attention of all T rows. query and out are float32 [T, Hq_local * D]; out rows of
  // padding are zero. Reads the cache through the block tables only, so WriteKv of this step must
  // come first.
  virtual void Forward(const AttentionGeometry& geometry, const AttentionMetadata& metadata,
                       const MatrixView& query, const KvCacheView& cache,
                       const MatrixView& out) const = 0;
};

}  // namespace lockstep
