#include "attention/cuda_attention.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numbers>

#include "attention/cuda_kernels.h"
#include "attention/cuda_page_copy.h"

namespace lockstep {
namespace {

int64_t CeilDivide(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t PlanBytes(const CudaAttentionWorkspace::Options& o) {
  return static_cast<int64_t>(sizeof(DecodePlanHeader)) +
         o.max_num_requests * o.max_splits * static_cast<int64_t>(sizeof(DecodeItem));
}

// Per (request, query head, split): D values, and their largest logit and sum.
int64_t NumPartials(const CudaAttentionWorkspace::Options& o) {
  return o.max_num_requests * o.num_query_heads * o.max_splits;
}

int64_t PartialBytes(const CudaAttentionWorkspace::Options& o) {
  return NumPartials(o) * (o.head_dim + 2) * static_cast<int64_t>(sizeof(float));
}

// Decode's, by (request, query head), then prefill's one.
int64_t NumDecodeCounters(const CudaAttentionWorkspace::Options& o) {
  return o.max_num_requests * o.num_query_heads;
}

int64_t CounterBytes(const CudaAttentionWorkspace::Options& o) {
  return (NumDecodeCounters(o) + 1) * static_cast<int64_t>(sizeof(uint32_t));
}

absl::Status CheckOptions(const CudaAttentionWorkspace::Options& o) {
  const struct {
    const char* name;
    int64_t value;
  } sizes[] = {{"max_num_requests", o.max_num_requests}, {"max_num_tokens", o.max_num_tokens},
               {"max_model_len", o.max_model_len},       {"num_query_heads", o.num_query_heads},
               {"num_kv_heads", o.num_kv_heads},         {"head_dim", o.head_dim},
               {"min_split_keys", o.min_split_keys},     {"max_splits", o.max_splits},
               {"multiprocessors", o.multiprocessors}};
  for (const auto& size : sizes) {
    if (size.value >= 1 && size.value < (int64_t{1} << 31)) continue;
    return absl::InvalidArgumentError(
        absl::StrFormat("CUDA attention workspace: %s is %d", size.name, size.value));
  }
  if (o.max_splits > kMaxSplits || o.min_split_keys % kDecodeKeyTile != 0) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "CUDA attention workspace: max_splits %d is above %d, or min_split_keys %d is not a "
        "multiple of %d",
        o.max_splits, kMaxSplits, o.min_split_keys, kDecodeKeyTile));
  }
  if (o.max_num_requests * o.max_splits * std::max<int64_t>(kMaxHeadTiles, o.num_query_heads) >=
      int64_t{1} << 31) {
    return absl::InvalidArgumentError(
        absl::StrFormat("CUDA attention workspace: %d requests of %d parts are too many",
                        o.max_num_requests, o.max_splits));
  }
  if (o.sliding_windows.empty() || std::ssize(o.sliding_windows) > kMaxPlanWindows) {
    return absl::InvalidArgumentError(
        absl::StrFormat("CUDA attention: %d different sliding windows; 1 to %d are supported",
                        std::ssize(o.sliding_windows), kMaxPlanWindows));
  }
  return absl::OkStatus();
}

bool Aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

// Rows of the cache are copied in pieces of 16 bytes.
bool RunsOnTensorCores(AttentionTypes types, int64_t head_dim) {
  return types.activations != DType::kF32 && head_dim * SizeOf(types.cache) % 16 == 0 &&
         head_dim <= kMaxTensorCoreHeadDim;
}

absl::Status CheckGeometry(const AttentionGeometry& g) {
  if (g.head_dim < 1 || g.head_dim > kMaxHeadDim) {
    return absl::UnimplementedError(
        absl::StrFormat("CUDA attention: head_dim %d is outside 1 to %d", g.head_dim, kMaxHeadDim));
  }
  if (!(g.scale > 0) || g.logit_softcap < 0 || g.sliding_window < 0) {
    return absl::InvalidArgumentError(
        absl::StrFormat("CUDA attention: scale %g, logit soft-cap %g, sliding window %d", g.scale,
                        g.logit_softcap, g.sliding_window));
  }
  int64_t next_head = 0;
  int64_t head_tiles = 0;
  for (const Range& group : g.kv_groups) {
    if (group.begin != next_head || group.end < group.begin) {
      return absl::InvalidArgumentError(
          absl::StrFormat("CUDA attention: a KV head's query heads are %d to %d, after %d",
                          group.begin, group.end, next_head));
    }
    next_head = group.end;
    head_tiles += CeilDivide(group.size(), kDecodeHeadTile);
  }
  if (next_head != g.num_query_heads || std::ssize(g.kv_groups) != g.num_kv_heads) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "CUDA attention: %d groups with %d query heads for %d KV heads and %d query heads",
        g.kv_groups.size(), next_head, g.num_kv_heads, g.num_query_heads));
  }
  if (std::max(head_tiles, g.num_kv_heads) > kMaxHeadTiles) {
    return absl::UnimplementedError(
        absl::StrFormat("CUDA attention: %d KV heads or tiles of %d query heads on one device; up "
                        "to %d are supported",
                        std::max(head_tiles, g.num_kv_heads), kDecodeHeadTile, kMaxHeadTiles));
  }
  return absl::OkStatus();
}

// `k_scale`: of the keys as they are stored.
LogitScale MakeLogitScale(const AttentionGeometry& g, double k_scale) {
  constexpr double kLog2E = std::numbers::log2e;
  const double logit = g.scale * k_scale;  // of a product
  LogitScale scale = {
      .factor = static_cast<float>(logit * kLog2E), .cap_input = 0, .cap_output = 0};
  if (g.logit_softcap > 0) {
    scale.cap_input = static_cast<float>(2 * kLog2E * logit / g.logit_softcap);
    scale.cap_output = static_cast<float>(g.logit_softcap * kLog2E);
  }
  return scale;
}

PagedKv MakePagedKv(const CudaAttentionBatch& batch, const KvCacheView& cache) {
  const bool power_of_two = std::has_single_bit(static_cast<uint64_t>(cache.block_size));
  return {
      .keys = cache.keys,
      .values = cache.values,
      .block_tables = batch.block_tables,
      .max_blocks = batch.max_blocks,
      .num_rows = cache.num_blocks * cache.num_kv_heads * cache.block_size,
      .num_kv_heads = static_cast<int32_t>(cache.num_kv_heads),
      .head_dim = static_cast<int32_t>(cache.head_dim),
      .block_size = static_cast<int32_t>(cache.block_size),
      .block_shift = power_of_two ? std::countr_zero(static_cast<uint64_t>(cache.block_size)) : -1,
      .value_scale = cache.v_scale};
}

AttentionRows MakeRows(const AttentionGeometry& g, const CudaAttentionBatch& batch,
                       const CudaRows& query, const CudaRows& out) {
  return {.query = query.data,
          .out = out.data,
          .query_stride = query.row_stride,
          .out_stride = out.row_stride,
          .num_query_heads = static_cast<int32_t>(g.num_query_heads),
          .num_tokens = static_cast<int32_t>(batch.num_tokens)};
}

PrefillParams MakePrefillParams(const AttentionGeometry& g, const CudaAttentionBatch& batch,
                                const CudaRows& query, const KvCacheView& cache,
                                const CudaRows& out) {
  PrefillParams params = {.rows = MakeRows(g, batch, query, out),
                          .kv = MakePagedKv(batch, cache),
                          .scale = MakeLogitScale(g, cache.k_scale),
                          .query_start_loc = batch.query_start_loc,
                          .seq_lens = batch.seq_lens,
                          .table_rows = batch.table_rows,
                          .num_requests = static_cast<int32_t>(batch.num_requests),
                          .window = static_cast<int32_t>(g.sliding_window),
                          .zero_padding_rows = batch.may_have_decode ? 0 : 1,
                          .largest_group = 0,
                          .first_head = {}};
  for (int64_t h = 0; h < g.num_kv_heads; ++h) {
    params.first_head[h] = static_cast<int16_t>(g.kv_groups[h].begin);
    params.largest_group =
        std::max(params.largest_group, static_cast<int32_t>(g.kv_groups[h].size()));
  }
  params.first_head[g.num_kv_heads] = static_cast<int16_t>(g.num_query_heads);
  return params;
}

void FillHeadTiles(const AttentionGeometry& g, DecodeParams& params) {
  for (int64_t h = 0; h < g.num_kv_heads; ++h) {
    const Range& group = g.kv_groups[h];
    for (int64_t head = group.begin; head < group.end; head += kDecodeHeadTile) {
      params.head_tiles[params.num_head_tiles++] = {
          .kv_head = static_cast<int16_t>(h),
          .first_head = static_cast<int16_t>(head),
          .num_heads = static_cast<int16_t>(std::min<int64_t>(kDecodeHeadTile, group.end - head))};
    }
  }
}

}  // namespace

int64_t CudaAttentionWorkspace::SizeBytes(const Options& options) {
  return PlanBytes(options) * std::ssize(options.sliding_windows) + PartialBytes(options) +
         CounterBytes(options);
}

absl::StatusOr<CudaAttentionWorkspace> CudaAttentionWorkspace::Create(const Options& options,
                                                                      CudaStream stream) {
  LOCKSTEP_RETURN_IF_ERROR(CheckOptions(options));
  static_assert(kMaxWindows == kMaxPlanWindows);
  CudaAttentionWorkspace workspace;
  workspace.options_ = options;
  LOCKSTEP_ASSIGN_OR_RETURN(
      workspace.plans_,
      DeviceBuffer::Create(PlanBytes(options) * std::ssize(options.sliding_windows),
                           "attention plans"));
  // Until the first PlanStep there is nothing to do.
  LOCKSTEP_RETURN_IF_ERROR(
      FillBytesAsync(workspace.plans_.data(), 0, workspace.plans_.size_bytes(), stream));
  LOCKSTEP_ASSIGN_OR_RETURN(
      workspace.partials_,
      DeviceBuffer::Create(PartialBytes(options), "partial results of decode attention"));
  LOCKSTEP_ASSIGN_OR_RETURN(workspace.counters_,
                            DeviceBuffer::Create(CounterBytes(options), "counters of attention"));
  LOCKSTEP_RETURN_IF_ERROR(
      FillBytesAsync(workspace.counters_.data(), 0, CounterBytes(options), stream));
  return workspace;
}

absl::Status CudaAttentionWorkspace::CheckBatchSize(const CudaAttentionBatch& batch) const {
  if (batch.num_requests <= options_.max_num_requests &&
      batch.num_tokens <= options_.max_num_tokens) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrFormat(
      "CUDA attention: a step of %d requests and %d tokens, made for up to %d and %d",
      batch.num_requests, batch.num_tokens, options_.max_num_requests, options_.max_num_tokens));
}

absl::Status CudaAttentionWorkspace::PlanStep(const CudaAttentionBatch& batch, CudaStream stream) {
  LOCKSTEP_RETURN_IF_ERROR(CheckBatchSize(batch));
  if (!batch.may_have_decode) return absl::OkStatus();
  const int64_t group = CeilDivide(options_.num_query_heads, options_.num_kv_heads);
  const int64_t head_tiles = options_.num_kv_heads * CeilDivide(group, kDecodeHeadTile);
  const int64_t blocks =
      std::min<int64_t>(options_.multiprocessors, 1 << 16) * DecodeBlocksAtOnce(options_.head_dim);
  PlanParams params = {.query_start_loc = batch.query_start_loc,
                       .seq_lens = batch.seq_lens,
                       .table_rows = batch.table_rows,
                       .plans = plans_.as<char>(),
                       .plan_stride_bytes = PlanBytes(options_),
                       .num_requests = static_cast<int32_t>(batch.num_requests),
                       .num_windows = static_cast<int32_t>(options_.sliding_windows.size()),
                       .windows = {},
                       .min_split_keys = static_cast<int32_t>(options_.min_split_keys),
                       .max_splits = static_cast<int32_t>(options_.max_splits),
                       .num_head_tiles = static_cast<int32_t>(head_tiles),
                       .num_blocks = static_cast<int32_t>(blocks)};
  for (size_t i = 0; i < options_.sliding_windows.size(); ++i) {
    params.windows[i] = static_cast<int32_t>(options_.sliding_windows[i]);
  }
  return LaunchPlan(params, options_.programmatic_launch, stream);
}

absl::Status CudaWriteKv(const CudaAttentionBatch& batch, const CudaKvRows& rows,
                         const KvCacheView& cache, CudaStream stream, bool programmatic_launch) {
  const int64_t width = cache.num_kv_heads * cache.head_dim;
  if (rows.row_stride < width || cache.block_size != batch.block_size) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "CUDA attention: rows of %d KV heads of %d, %d elements apart, to blocks of %d; the batch "
        "has blocks of %d",
        cache.num_kv_heads, cache.head_dim, rows.row_stride, cache.block_size, batch.block_size));
  }
  return LaunchWriteKv({.keys = rows.keys,
                        .values = rows.values,
                        .row_stride = rows.row_stride,
                        .cache_keys = cache.keys,
                        .cache_values = cache.values,
                        .slot_mapping = batch.slot_mapping,
                        .num_tokens = static_cast<int32_t>(batch.num_tokens),
                        .num_kv_heads = static_cast<int32_t>(cache.num_kv_heads),
                        .head_dim = static_cast<int32_t>(cache.head_dim),
                        .block_size = static_cast<int32_t>(cache.block_size),
                        .k_scale = cache.k_scale,
                        .v_scale = cache.v_scale},
                       rows.dtype, cache.dtype, programmatic_launch, stream);
}

absl::StatusOr<CudaPrefill> DefaultCudaPrefill(DType kv_dtype) {
  LOCKSTEP_ASSIGN_OR_RETURN(const bool has_warpgroup, HasWarpgroupProducts());
  return has_warpgroup && kv_dtype != DType::kF8E4M3 ? CudaPrefill::kWarpgroup : CudaPrefill::kMma;
}

absl::StatusOr<CudaAttentionLayer> CudaAttentionLayer::Create(const AttentionGeometry& geometry,
                                                              DType dtype, DType kv_dtype,
                                                              CudaPrefill prefill) {
  LOCKSTEP_RETURN_IF_ERROR(CheckGeometry(geometry));
  const bool is_fp8 = kv_dtype == DType::kF8E4M3;
  if (dtype == DType::kF8E4M3 || (kv_dtype != dtype && !is_fp8)) {
    return absl::UnimplementedError(absl::StrFormat(
        "CUDA attention: queries of %s with a cache of %s", Name(dtype), Name(kv_dtype)));
  }
  if (is_fp8 && prefill == CudaPrefill::kWarpgroup) {
    return absl::UnimplementedError("CUDA attention: warpgroup products with an fp8 cache");
  }
  const AttentionTypes types = {.activations = dtype, .cache = kv_dtype};
  CudaAttentionLayer layer;
  layer.geometry_ = geometry;
  layer.dtype_ = dtype;
  layer.kv_dtype_ = kv_dtype;
  layer.prefill_ = prefill;
  layer.tensor_cores_ = RunsOnTensorCores(types, geometry.head_dim);
  if (layer.tensor_cores_) {
    int64_t largest_group = 0;
    for (const Range& group : geometry.kv_groups) {
      largest_group = std::max(largest_group, group.size());
    }
    LOCKSTEP_ASSIGN_OR_RETURN(
        layer.decode_blocks_,
        PrepareDecode(types, geometry.head_dim, std::min<int64_t>(largest_group, kDecodeHeadTile)));
    LOCKSTEP_RETURN_IF_ERROR(PreparePrefill(types, geometry.head_dim));
    if (prefill == CudaPrefill::kWarpgroup) {
      LOCKSTEP_ASSIGN_OR_RETURN(const bool has_warpgroup, HasWarpgroupProducts());
      if (!has_warpgroup) {
        return absl::UnimplementedError(
            "CUDA attention: warpgroup products need an H100 or H200 and a build for sm_90a");
      }
      LOCKSTEP_ASSIGN_OR_RETURN(layer.prefill_blocks_,
                                PreparePrefillWgmma(dtype, geometry.head_dim));
    }
  }
  return layer;
}

absl::Status CudaAttentionLayer::CheckArguments(const CudaAttentionBatch& batch,
                                                const CudaAttentionWorkspace& workspace,
                                                const CudaRows& query, const KvCacheView& cache,
                                                const CudaRows& out) const {
  LOCKSTEP_RETURN_IF_ERROR(workspace.CheckBatchSize(batch));
  const int64_t width = geometry_.num_query_heads * geometry_.head_dim;
  const auto& o = workspace.options_;
  if (geometry_.num_query_heads > o.num_query_heads || geometry_.num_kv_heads > o.num_kv_heads ||
      geometry_.head_dim > o.head_dim) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "CUDA attention: a layer of %d query heads, %d KV heads and head_dim %d with a workspace "
        "for %d, %d and %d",
        geometry_.num_query_heads, geometry_.num_kv_heads, geometry_.head_dim, o.num_query_heads,
        o.num_kv_heads, o.head_dim));
  }
  if (query.dtype != dtype_ || out.dtype != dtype_ || cache.dtype != kv_dtype_) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "CUDA attention: a layer made for %s and a cache of %s with queries of %s, outputs of %s "
        "and a cache of %s",
        Name(dtype_), Name(kv_dtype_), Name(query.dtype), Name(out.dtype), Name(cache.dtype)));
  }
  if (cache.num_kv_heads != geometry_.num_kv_heads || cache.head_dim != geometry_.head_dim ||
      cache.block_size != batch.block_size || query.row_stride < width || out.row_stride < width) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "CUDA attention: a cache of %d heads of %d in blocks of %d, query rows %d and output rows "
        "%d apart, for %d query heads, %d KV heads of %d and blocks of %d",
        cache.num_kv_heads, cache.head_dim, cache.block_size, query.row_stride, out.row_stride,
        geometry_.num_query_heads, geometry_.num_kv_heads, geometry_.head_dim, batch.block_size));
  }
  if (cache.num_blocks * cache.num_kv_heads * cache.block_size >= (int64_t{1} << 31)) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "CUDA attention: %d blocks of %d tokens and %d KV heads in a layer; their product must be "
        "below 2^31",
        cache.num_blocks, cache.block_size, cache.num_kv_heads));
  }
  if (tensor_cores_ &&
      (!Aligned(query.data) || !Aligned(out.data) || !Aligned(cache.keys) ||
       !Aligned(cache.values) || query.row_stride % 8 != 0 || out.row_stride % 8 != 0)) {
    return absl::InvalidArgumentError(
        "CUDA attention: rows of queries, outputs or the cache are not aligned to 16 bytes");
  }
  return absl::OkStatus();
}

absl::Status CudaAttentionLayer::Forward(const CudaAttentionBatch& batch,
                                         CudaAttentionWorkspace& workspace, const CudaRows& query,
                                         const KvCacheView& cache, const CudaRows& out,
                                         CudaStream stream) const {
  LOCKSTEP_RETURN_IF_ERROR(CheckArguments(batch, workspace, query, cache, out));
  if (batch.num_tokens == 0 || geometry_.num_query_heads == 0) return absl::OkStatus();
  const auto& options = workspace.options_;
  const bool programmatic = options.programmatic_launch;
  const AttentionTypes types = {.activations = dtype_, .cache = kv_dtype_};
  const PrefillParams prefill = MakePrefillParams(geometry_, batch, query, cache, out);
  if (!tensor_cores_) {
    return LaunchGeneric(prefill, geometry_.scale * cache.k_scale, geometry_.logit_softcap, types,
                         programmatic, stream);
  }
  if (batch.may_have_decode) {
    const auto window = std::find(options.sliding_windows.begin(), options.sliding_windows.end(),
                                  geometry_.sliding_window);
    if (window == options.sliding_windows.end()) {
      return absl::InvalidArgumentError(
          absl::StrFormat("CUDA attention: the workspace was not made for a sliding window of %d",
                          geometry_.sliding_window));
    }
    float* const partials = workspace.partials_.as<float>();
    DecodeParams params = {.rows = prefill.rows,
                           .kv = prefill.kv,
                           .scale = prefill.scale,
                           .plan = reinterpret_cast<const DecodePlanHeader*>(
                               workspace.plans_.as<char>() +
                               (window - options.sliding_windows.begin()) * PlanBytes(options)),
                           .partials = partials,
                           .partial_stats = partials + NumPartials(options) * options.head_dim,
                           .runs_done = workspace.counters_.as<uint32_t>(),
                           .max_splits = static_cast<int32_t>(options.max_splits),
                           .num_head_tiles = 0,
                           .head_tiles = {}};
    FillHeadTiles(geometry_, params);
    const int64_t most_splits =
        std::min(options.max_splits, CeilDivide(options.max_model_len, options.min_split_keys));
    const int64_t most_items = batch.num_requests * most_splits * params.num_head_tiles;
    LOCKSTEP_RETURN_IF_ERROR(LaunchDecode(
        params, types, std::clamp<int64_t>(most_items, 1, decode_blocks_), programmatic, stream));
  }
  if (!batch.may_have_prefill) return absl::OkStatus();
  if (prefill_ == CudaPrefill::kWarpgroup && CanCopyPages(cache, kPageRowMultiple)) {
    return LaunchPrefillWgmma(prefill, cache,
                              workspace.counters_.as<uint32_t>() + NumDecodeCounters(options),
                              dtype_, prefill_blocks_, programmatic, stream);
  }
  return LaunchPrefill(prefill, types, programmatic, stream);
}

}  // namespace lockstep
