// Paged attention on a CUDA device: launchers that take device memory and a stream, for the model's
// CUDA forward pass and for CUDA graphs. No CUDA header is needed to include this.
//
// A step is: CudaAttentionWorkspace::PlanStep once, then for each layer a write of its keys and
// values (CudaWriteKv, or the model's own kernel) and CudaAttentionLayer::Forward, all on one
// stream. Nothing is allocated and the host never waits.
//
// Requests of a step come in any order, mixed: those with one query row run in the decode kernel,
// longer ones (prefill chunks) in the prefill kernel; each kernel passes over the other's.
//
// Decode is split over keys. How a request's keys are cut depends on its own length and the layer's
// window alone, and the parts are merged in ascending order, whichever is done last; in prefill a
// row's key tiles start at fixed positions. So a row has the same bits whatever else is in the
// batch, wherever in it the request is, and however the prompt is cut into chunks of two or more
// rows. Decode and prefill differ in rounding.
//
// What a graph may capture: PlanStep, CudaWriteKv and Forward. Launch sizes depend on the host
// fields of CudaAttentionBatch and on what the workspace was created with, never on lengths, which
// are read on the device; so one graph for a batch size (a bucket) serves every step that is padded
// to it.
//
// Thread rule: as for the stream; a workspace belongs to one stream at a time.
#pragma once

#include <cstdint>
#include <vector>

#include "attention/attention_backend.h"
#include "cache/kv_view.h"
#include "runtime/core/cuda_device.h"

namespace lockstep {

// AttentionBatch on the device. The arrays stay at their addresses from step to step when graphs
// are replayed. Unchecked: CheckBatch (attention/batch_check.h) does that on the host's copy.
struct CudaAttentionBatch {
  const int32_t* query_start_loc = nullptr;  // [B + 1]
  // [B] tokens visible after this step's writes. 0 with at most one query row: a padding request,
  // whose row becomes zero.
  const int32_t* seq_lens = nullptr;
  const int32_t* block_tables = nullptr;  // [tables, max_blocks]
  const int32_t* table_rows = nullptr;    // [B] rows of block_tables; null: request b's is row b
  const int64_t* slot_mapping = nullptr;  // [T], kNoSlot writes nothing

  // Known to the host.
  int64_t max_blocks = 0;    // a row of block_tables
  int64_t block_size = 0;    // P
  int64_t num_requests = 0;  // B, padding requests included
  // T, padding rows included: rows from query_start_loc[B] on become zero.
  int64_t num_tokens = 0;
  // False promises that no request has one query row, and none more than one. A promise that is not
  // kept leaves rows unwritten; true is always right.
  bool may_have_decode = true;
  bool may_have_prefill = true;
};

// Memory of all layers' split decode, sized once.
class CudaAttentionWorkspace {
 public:
  struct Options {
    int64_t max_num_requests = 0;                // largest B
    int64_t max_num_tokens = 0;                  // largest T
    int64_t max_model_len = 0;                   // largest seq_len
    int64_t num_query_heads = 0;                 // largest Hq_local of the layers
    int64_t num_kv_heads = 0;                    // largest Hkv_local of the layers
    int64_t head_dim = 0;                        // largest D of the layers
    std::vector<int64_t> sliding_windows = {0};  // those of the layers, each once; 0: none
    // A request's visible keys are cut into parts of about min_split_keys while these are few, then
    // into larger ones, at most max_splits of them: see kPartsOfLeastSize. Both change rounding.
    int64_t min_split_keys = 256;
    int64_t max_splits = 32;
    // Of the device: an H200's. They decide which parts one block does after the other; results do
    // not depend on them.
    int64_t multiprocessors = 132;
    // Launch the kernels with programmatic stream serialization: they may start while the kernel
    // before them runs, and wait for its end before they read or write anything. (They let the next
    // one start early in any case, should it be launched so.)
    bool programmatic_launch = false;
  };

  // InvalidArgument for sizes below 1, or windows more than kMaxWindows; ResourceExhausted, with
  // the size, when the device has no room.
  static constexpr int64_t kMaxWindows = 8;
  static absl::StatusOr<CudaAttentionWorkspace> Create(const Options& options, CudaStream stream);
  // Bytes of device memory that Create takes.
  static int64_t SizeBytes(const Options& options);

  CudaAttentionWorkspace() = default;

  // Cuts this step's decode requests into work items, on the device, for all layers. Must come
  // after the batch's arrays are written and before the first Forward. InvalidArgument when the
  // batch is larger than the options. Cheap: one small kernel.
  absl::Status PlanStep(const CudaAttentionBatch& batch, CudaStream stream);

  // InvalidArgument when the batch is larger than the options.
  absl::Status CheckBatchSize(const CudaAttentionBatch& batch) const;

 private:
  friend class CudaAttentionLayer;

  Options options_;
  DeviceBuffer plans_;  // for each window a header and its items; see cuda_kernels.h
  DeviceBuffer
      partials_;  // f32 [B, Hq_local, splits, D] weighted values, then [.., 2] maxima, sums
  DeviceBuffer counters_;  // u32 [B * Hq_local + 1], all 0 but while kernels run
};

// Rows of keys and values on the device, each [T, Hkv_local * D], `row_stride` elements apart: for
// instance two ranges of columns of the fused qkv.
struct CudaKvRows {
  const void* keys = nullptr;
  const void* values = nullptr;
  DType dtype = DType::kBF16;
  int64_t row_stride = 0;
};

// Writes row t of keys and values to slot slot_mapping[t] of the cache (device memory), divided by
// its scale and converted to its dtype, nearest-even. InvalidArgument for views that do not fit
// together.
absl::Status CudaWriteKv(const CudaAttentionBatch& batch, const CudaKvRows& rows,
                         const KvCacheView& cache, CudaStream stream,
                         bool programmatic_launch = false);

// Rows of queries or outputs on the device, [T, Hq_local * D].
struct CudaRows {
  void* data = nullptr;
  DType dtype = DType::kBF16;
  int64_t row_stride = 0;  // elements, >= Hq_local * D
};

// Which tensor-core products prefill is made of: mma.sync, or Hopper's warpgroup products, which an
// H100 or H200 has and a build for sm_90a uses. The latter read blocks of a multiple of 8 tokens
// and no fp8 cache; a layer made for them reads other blocks with mma.sync.
enum class CudaPrefill { kMma, kWarpgroup };
// The faster of what device, build and cache allow. Internal for CUDA's errors.
absl::StatusOr<CudaPrefill> DefaultCudaPrefill(DType kv_dtype);

// One layer's attention: its geometry, checked and laid out once. Holds no device memory.
class CudaAttentionLayer {
 public:
  // `dtype`: of queries and outputs. Unimplemented, by name, for what the kernels cannot do: a
  // cache of another dtype, unless it is kF8E4M3; head_dim beyond 512, more than 256 groups of up
  // to 16 query heads of one KV head. InvalidArgument for kv_groups that do not partition the
  // heads, or a scale that is not positive.
  //
  // bfloat16 and float16 with D <= 256 and a multiple of 8 (of 16 for an fp8 cache) run on tensor
  // cores: softmax and sums in float32, weights rounded to the dtype (float16 for an fp8 cache) for
  // their product with V. Anything else (float32, other D) runs in plain float32 arithmetic: exact
  // to float32's rounding, and slow.
  //
  // Unimplemented also for CudaPrefill::kWarpgroup with an fp8 cache, or where device or build do
  // not have it.
  static absl::StatusOr<CudaAttentionLayer> Create(const AttentionGeometry& geometry, DType dtype,
                                                   DType kv_dtype, CudaPrefill prefill);

  CudaAttentionLayer() = default;

  const AttentionGeometry& geometry() const { return geometry_; }
  // The same in plain float32 arithmetic, whatever the dtype: what the fast kernels are compared
  // with.
  CudaAttentionLayer InPlainArithmetic() const {
    CudaAttentionLayer layer = *this;
    layer.tensor_cores_ = false;
    return layer;
  }

  // Causal attention of all T rows: out row t, Hq_local * D wide, from query row t. Rows of padding
  // become zero. Reads the cache through the block tables, so this step's CudaWriteKv comes first;
  // slots no request sees may hold anything, NaN included. A key or value that is NaN or infinite
  // spoils the rows of its request that see it, and may spoil earlier rows of the same request.
  // InvalidArgument for views that do not fit; Internal for CUDA's errors.
  absl::Status Forward(const CudaAttentionBatch& batch, CudaAttentionWorkspace& workspace,
                       const CudaRows& query, const KvCacheView& cache, const CudaRows& out,
                       CudaStream stream) const;

 private:
  absl::Status CheckArguments(const CudaAttentionBatch& batch,
                              const CudaAttentionWorkspace& workspace, const CudaRows& query,
                              const KvCacheView& cache, const CudaRows& out) const;

  AttentionGeometry geometry_;
  DType dtype_ = DType::kBF16;
  DType kv_dtype_ = DType::kBF16;
  bool tensor_cores_ = false;
  CudaPrefill prefill_ = CudaPrefill::kMma;
  int64_t decode_blocks_ = 0;   // what the device runs at once
  int64_t prefill_blocks_ = 0;  // the same, of warpgroup products
};

}  // namespace lockstep
