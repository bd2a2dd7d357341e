#include "attention/cuda_backend.h"

#include <utility>

#include "attention/batch_check.h"
#include "attention/cuda_kernels.h"

namespace lockstep {
namespace {

class CudaMetadata : public AttentionMetadata {
 public:
  CudaAttentionBatch batch;
  int32_t largest_block = -1;
};

absl::Status UploadSpan(const DeviceBuffer& to, const void* from, int64_t bytes,
                        CudaStream stream) {
  if (bytes == 0) return absl::OkStatus();
  return CopyAsync(to.data(), from, bytes, stream);
}

CudaRows Rows(const MatrixView& view) {
  return {.data = view.data, .dtype = view.dtype, .row_stride = view.stride};
}

}  // namespace

const AttentionCapabilities& CudaAttentionCapabilities() {
  static const AttentionCapabilities capabilities = {
      .activation_dtypes = {DType::kBF16, DType::kF16, DType::kF32},
      .kv_dtypes = {DType::kBF16, DType::kF16, DType::kF32, DType::kF8E4M3},
      .activations_in_kv_dtype = true,
      .max_head_dim = kMaxHeadDim,
      .sliding_window = true,
      .logit_softcap = true,
      .deterministic = true,
      .graph_support = GraphSupport::kAlways,
  };
  return capabilities;
}

absl::StatusOr<std::unique_ptr<CudaBackend>> CudaBackend::Create(const Options& options,
                                                                 CudaStream stream) {
  std::unique_ptr<CudaBackend> backend(new CudaBackend());
  LOCKSTEP_ASSIGN_OR_RETURN(backend->workspace_,
                            CudaAttentionWorkspace::Create(options.sizes, stream));
  if (options.block_size < 1) {
    return absl::InvalidArgumentError(
        absl::StrFormat("CUDA attention: block size %d", options.block_size));
  }
  backend->options_ = options;
  backend->stream_ = stream;
  backend->max_blocks_ =
      (options.sizes.max_model_len + options.block_size - 1) / options.block_size;
  const int64_t requests = options.sizes.max_num_requests;
  const struct {
    DeviceBuffer* buffer;
    int64_t bytes;
  } buffers[] = {{&backend->query_start_loc_, (requests + 1) * 4},
                 {&backend->seq_lens_, requests * 4},
                 {&backend->block_tables_, requests * backend->max_blocks_ * 4},
                 {&backend->slots_, options.sizes.max_num_tokens * 8}};
  for (const auto& [buffer, bytes] : buffers) {
    LOCKSTEP_ASSIGN_OR_RETURN(*buffer, DeviceBuffer::Create(bytes, "attention batch"));
  }
  return backend;
}

absl::Status CudaBackend::Upload(const AttentionBatch& batch, int64_t block_size) const {
  const int64_t requests = batch.num_requests();
  LOCKSTEP_RETURN_IF_ERROR(
      UploadSpan(query_start_loc_, batch.query_start_loc.data(), (requests + 1) * 4, stream_));
  LOCKSTEP_RETURN_IF_ERROR(UploadSpan(seq_lens_, batch.seq_lens.data(), requests * 4, stream_));
  LOCKSTEP_RETURN_IF_ERROR(
      UploadSpan(slots_, batch.slot_mapping.data(), batch.num_tokens() * 8, stream_));
  for (int64_t b = 0; b < requests; ++b) {
    const int64_t blocks = (int64_t{batch.seq_lens[b]} + block_size - 1) / block_size;
    if (blocks > max_blocks_) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "CUDA attention: request %d has %d blocks, made for up to %d", b, blocks, max_blocks_));
    }
    if (blocks == 0) continue;
    LOCKSTEP_RETURN_IF_ERROR(CopyAsync(block_tables_.as<int32_t>() + b * max_blocks_,
                                       batch.BlockTable(b), blocks * 4, stream_));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<AttentionMetadata>> CudaBackend::BuildMetadata(
    const AttentionBatch& batch, int64_t block_size) const {
  LOCKSTEP_RETURN_IF_ERROR(CheckBatch(batch, block_size));
  auto metadata = std::make_unique<CudaMetadata>();
  CudaAttentionBatch& on_device = metadata->batch;
  on_device = {.query_start_loc = query_start_loc_.as<int32_t>(),
               .seq_lens = seq_lens_.as<int32_t>(),
               .block_tables = block_tables_.as<int32_t>(),
               .table_rows = nullptr,
               .slot_mapping = slots_.as<int64_t>(),
               .max_blocks = max_blocks_,
               .block_size = block_size,
               .num_requests = batch.num_requests(),
               .num_tokens = batch.num_tokens(),
               .may_have_decode = batch.num_requests() == 0,  // padding rows only
               .may_have_prefill = false};
  for (int64_t b = 0; b < batch.num_requests(); ++b) {
    const int64_t rows = batch.query_start_loc[b + 1] - batch.query_start_loc[b];
    on_device.may_have_decode |= rows == 1;
    on_device.may_have_prefill |= rows > 1;
  }
  if (!on_device.may_have_prefill) on_device.may_have_decode = true;
  metadata->largest_block = LargestBlock(batch, block_size);
  LOCKSTEP_RETURN_IF_ERROR(workspace_.CheckBatchSize(on_device));
  LOCKSTEP_RETURN_IF_ERROR(Upload(batch, block_size));
  LOCKSTEP_RETURN_IF_ERROR(workspace_.PlanStep(on_device, stream_));
  return metadata;
}

void CudaBackend::WriteKv(const MatrixView& keys, const MatrixView& values,
                          std::span<const int64_t> slots, const KvCacheView& cache) const {
  const int64_t width = cache.num_kv_heads * cache.head_dim;
  const int64_t num_slots = cache.num_blocks * cache.block_size;
  const int64_t tokens = std::ssize(slots);
  LOCKSTEP_CHECK(keys.dtype == values.dtype && keys.stride == values.stride);
  LOCKSTEP_CHECK(keys.rows == tokens && keys.cols == width);
  LOCKSTEP_CHECK(values.rows == tokens && values.cols == width);
  for (int64_t slot : slots) LOCKSTEP_CHECK(slot >= kNoSlot && slot < num_slots);
  // Through the buffer of the batch's slot mapping, which attention itself does not read.
  LOCKSTEP_CHECK(tokens <= options_.sizes.max_num_tokens);
  Keep(UploadSpan(slots_, slots.data(), tokens * 8, stream_));
  CudaAttentionBatch batch;
  batch.slot_mapping = slots_.as<int64_t>();
  batch.block_size = cache.block_size;
  batch.num_tokens = tokens;
  Keep(CudaWriteKv(
      batch,
      {.keys = keys.data, .values = values.data, .dtype = keys.dtype, .row_stride = keys.stride},
      cache, stream_, options_.sizes.programmatic_launch));
}

absl::Status CudaBackend::RunForward(const AttentionGeometry& geometry,
                                     const CudaAttentionBatch& batch, const MatrixView& query,
                                     const KvCacheView& cache, const MatrixView& out) const {
  LOCKSTEP_ASSIGN_OR_RETURN(CudaPrefill prefill, DefaultCudaPrefill(cache.dtype));
  prefill = options_.prefill.value_or(prefill);
  LOCKSTEP_ASSIGN_OR_RETURN(
      const CudaAttentionLayer layer,
      CudaAttentionLayer::Create(geometry, query.dtype, cache.dtype, prefill));
  return layer.Forward(batch, workspace_, Rows(query), cache, Rows(out), stream_);
}

void CudaBackend::Forward(const AttentionGeometry& geometry, const AttentionMetadata& metadata,
                          const MatrixView& query, const KvCacheView& cache,
                          const MatrixView& out) const {
  const auto* const cuda = dynamic_cast<const CudaMetadata*>(&metadata);
  LOCKSTEP_CHECK(cuda != nullptr);
  const int64_t width = geometry.num_query_heads * geometry.head_dim;
  LOCKSTEP_CHECK(query.rows == cuda->batch.num_tokens && query.cols == width);
  LOCKSTEP_CHECK(out.rows == cuda->batch.num_tokens && out.cols == width);
  LOCKSTEP_CHECK(cuda->largest_block < cache.num_blocks);
  Keep(RunForward(geometry, cuda->batch, query, cache, out));
}

void CudaBackend::Keep(const absl::Status& status) const {
  if (status_.ok()) status_ = status;
}

}  // namespace lockstep
