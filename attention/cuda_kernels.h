// Parameters and launch functions of the CUDA attention kernels: between cuda_attention.cc and the
// .cu files. What they compute is said in cuda_attention.h. No CUDA header.
#pragma once

#include <cstdint>

#include "cache/kv_view.h"
#include "runtime/core/cuda_device.h"
#include "runtime/core/dtype.h"

namespace lockstep {

// ---- Decode plan --------------------------------------------------------------------------------

// Parts `first_split` and up of `num_splits` of the keys that one decode row sees: a run of them,
// keys [key_begin, key_end), empty for a padding request. The first `long_parts` of the run have
// `part_tiles` + 1 tiles of keys each, the others `part_tiles`, but that the row's first part
// begins, and its last ends, where its keys do.
struct alignas(16) DecodeItem {
  int32_t request;
  int32_t row;        // of the step
  int32_t table_row;  // of block_tables
  int32_t key_begin;
  int32_t key_end;
  int32_t first_split;
  int32_t num_splits;
  int32_t part_tiles;
  int32_t long_parts;
  int32_t num_runs;  // of the row
  int32_t unused[2];
};

// A window's plan: this, then the items.
struct alignas(16) DecodePlanHeader {
  int32_t num_items;
  int32_t num_rows;  // query_start_loc[B]: rows from here on are padding
  int32_t unused[2];
};

// A row's visible keys, from the first one's multiple of kFirstKeyMultiple on, are tiles of
// kDecodeKeyTile keys, dealt to its parts as equally as can be. Up to kPartsOfLeastSize parts of
// about the least size there are; of more keys, both number and size of the parts grow, with the
// square root of the keys.
//
// Parts decide about rounding, runs only about who does the work: of few requests each part is a
// run, of many one run has all of a row's parts, so that nothing of it goes through memory.
inline constexpr int kDecodeKeyTile = 64;
inline constexpr int kPartsOfLeastSize = 16;
inline constexpr int kFirstKeyMultiple = 16;
inline constexpr int kMaxSplits = 64;
inline constexpr int kMaxPlanWindows = 8;

struct PlanParams {
  const int32_t* query_start_loc;
  const int32_t* seq_lens;
  const int32_t* table_rows;  // or null
  char* plans;                // one for each window
  int64_t plan_stride_bytes;
  int32_t num_requests;
  int32_t num_windows;
  int32_t windows[kMaxPlanWindows];  // 0: none
  int32_t min_split_keys;
  int32_t max_splits;
  // The length of the runs depends on these two, of the layer with most of them.
  int32_t num_head_tiles;
  int32_t num_blocks;  // that run at once
};

absl::Status LaunchPlan(const PlanParams& params, bool programmatic, CudaStream stream);

// ---- Attention ----------------------------------------------------------------------------------

// The cache of a layer and the way to it. Row index of (block, head, offset): (block * Hkv + head)
// * P + offset, below 2^31.
struct PagedKv {
  const void* keys;
  const void* values;
  const int32_t* block_tables;
  int64_t max_blocks;
  int64_t num_rows;  // of keys, and of values
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t block_size;
  int32_t block_shift;  // log2 of block_size, -1 when it is no power of two
  float value_scale;    // of a value that is stored; a key's is in LogitScale
};

// From a product s = q . k to the logit in units of log2(e): s * factor, or, where cap_output is
// not 0, cap_output * tanh(s * cap_input / (2 log2(e))).
struct LogitScale {
  float factor;
  float cap_input;
  float cap_output;
};

struct AttentionRows {
  const void* query;
  void* out;
  int64_t query_stride;  // elements
  int64_t out_stride;
  int32_t num_query_heads;
  int32_t num_tokens;  // T
};

struct DecodeHeadTile {
  int16_t kv_head;
  int16_t first_head;
  int16_t num_heads;  // up to kDecodeHeadTile
};

inline constexpr int kDecodeHeadTile = 16;
inline constexpr int kMaxHeadTiles = 256;
inline constexpr int kMaxTensorCoreHeadDim = 256;
inline constexpr int kMaxHeadDim = 512;

// Blocks of a multiprocessor: what shared memory has room for.
constexpr int DecodeBlocksAtOnce(int64_t head_dim) { return head_dim <= 128 ? 2 : 1; }

struct DecodeParams {
  AttentionRows rows;
  PagedKv kv;
  LogitScale scale;
  const DecodePlanHeader* plan;
  float* partials;       // [B, Hq, max_splits, D] weighted values, not divided by their sum
  float* partial_stats;  // [B, Hq, max_splits, 2] largest logit (log2), sum
  uint32_t* runs_done;   // [B, Hq] by a head tile's first head; 0 between launches
  int32_t max_splits;
  int32_t num_head_tiles;
  DecodeHeadTile head_tiles[kMaxHeadTiles];
};

struct PrefillParams {
  AttentionRows rows;
  PagedKv kv;
  LogitScale scale;
  const int32_t* query_start_loc;
  const int32_t* seq_lens;
  const int32_t* table_rows;  // or null
  int32_t num_requests;
  int32_t window;             // 0: none
  int32_t zero_padding_rows;  // 1: this kernel does it
  int32_t largest_group;
  int16_t first_head[kMaxHeadTiles + 1];  // of each KV head, then Hq
};

// Of queries and outputs, bfloat16 or float16 where nothing else is said, and of the cache: the
// same or kF8E4M3.
struct AttentionTypes {
  DType activations;
  DType cache;
};

// Once, before the first launch: raises the kernel's shared memory, and reads how many blocks of it
// run at once on the device.
// `largest_tile`: query heads of a DecodeHeadTile.
absl::StatusOr<int64_t> PrepareDecode(AttentionTypes types, int64_t head_dim, int64_t largest_tile);
absl::Status PreparePrefill(AttentionTypes types, int64_t head_dim);
// Whether this device, and this build (sm_90a), has warpgroup products.
absl::StatusOr<bool> HasWarpgroupProducts();
// Where it has them: how many blocks run at once.
absl::StatusOr<int64_t> PreparePrefillWgmma(DType dtype, int64_t head_dim);

// At most `num_blocks` blocks loop over the plan's items.
absl::Status LaunchDecode(const DecodeParams& params, AttentionTypes types, int64_t num_blocks,
                          bool programmatic, CudaStream stream);
absl::Status LaunchPrefill(const PrefillParams& params, AttentionTypes types, bool programmatic,
                           CudaStream stream);
// Of a cache in the activations' dtype, that of `params`, whose pages CanCopyPages copies. Up to
// `num_blocks` blocks take their work from a counter, which is 0 between launches.
absl::Status LaunchPrefillWgmma(const PrefillParams& params, const KvCacheView& cache,
                                uint32_t* work_counter, DType dtype, int64_t num_blocks,
                                bool programmatic, CudaStream stream);
// float32 activations, too; any head_dim up to kMaxHeadDim, rows of any number per request.
absl::Status LaunchGeneric(const PrefillParams& params, float scale, float softcap,
                           AttentionTypes types, bool programmatic, CudaStream stream);

// ---- Cache write --------------------------------------------------------------------------------

struct WriteKvParams {
  const void* keys;
  const void* values;
  int64_t row_stride;  // elements
  void* cache_keys;
  void* cache_values;
  const int64_t* slot_mapping;
  int32_t num_tokens;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t block_size;
  float k_scale;
  float v_scale;
};

absl::Status LaunchWriteKv(const WriteKvParams& params, DType from, DType to, bool programmatic,
                           CudaStream stream);

}  // namespace lockstep
