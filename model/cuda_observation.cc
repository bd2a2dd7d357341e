#include "model/cuda_observation.h"

namespace lockstep {

namespace {

absl::Status Grow(Buffer& buffer, int64_t bytes) {
  if (buffer.size_bytes() >= bytes) return absl::OkStatus();
  buffer = Buffer();  // not both at once
  LOCKSTEP_ASSIGN_OR_RETURN(buffer, Buffer::Create(bytes, "a tensor of the GPU to look at"));
  return absl::OkStatus();
}

// Of keys, and of values.
int64_t BlockBytes(const KvCacheView& cache) {
  return cache.num_kv_heads * cache.block_size * cache.head_dim * SizeOf(cache.dtype);
}

}  // namespace

void CudaObservation::BeginStep(TensorObserver* observer, std::span<const int64_t> slots,
                                int64_t block_size) {
  observer_ = observer;
  if (observer != nullptr) touched_ = TouchBlocks(slots, block_size);
}

absl::Status CudaObservation::Show(int64_t layer, TensorKind kind, const MatrixView& tensor) {
  if (observer_ == nullptr) return absl::OkStatus();
  LOCKSTEP_ASSIGN_OR_RETURN(const MatrixView values, Read(tensor));
  observer_->Observe(layer, kind, values);
  return observer_->writes() ? Write(values, tensor) : absl::OkStatus();
}

absl::Status CudaObservation::ShowQkv(int64_t layer, const MatrixView& qkv,
                                      const KvCacheView& cache) {
  if (observer_ == nullptr) return absl::OkStatus();
  LOCKSTEP_ASSIGN_OR_RETURN(const MatrixView values, Read(qkv));
  LOCKSTEP_ASSIGN_OR_RETURN(const KvCacheView blocks, ReadBlocks(cache));
  const int64_t kv_cols = 2 * cache.num_kv_heads * cache.head_dim;
  const MatrixView kv{values.row<float>(0) + values.cols - kv_cols, DType::kF32, values.rows,
                      kv_cols, values.stride};
  ReadKvRows(blocks, touched_.slots, kv);
  observer_->Observe(layer, TensorKind::kQkv, values);
  if (!observer_->writes()) return absl::OkStatus();
  LOCKSTEP_RETURN_IF_ERROR(Write(values, qkv));
  WriteKvRows(kv, touched_.slots, blocks);
  return WriteBlocks(blocks, cache);
}

absl::StatusOr<MatrixView> CudaObservation::Read(const MatrixView& tensor) {
  LOCKSTEP_CHECK(tensor.stride == tensor.cols);
  const int64_t count = tensor.rows * tensor.cols;
  LOCKSTEP_RETURN_IF_ERROR(Grow(stored_, count * SizeOf(tensor.dtype)));
  LOCKSTEP_RETURN_IF_ERROR(Grow(values_, count * SizeOf(DType::kF32)));
  LOCKSTEP_RETURN_IF_ERROR(Copy(stored_.data(), tensor.data, count * SizeOf(tensor.dtype)));
  Convert(tensor.dtype, stored_.data(), DType::kF32, values_.data(), count);
  return MatrixView{values_.data(), DType::kF32, tensor.rows, tensor.cols, tensor.cols};
}

absl::Status CudaObservation::Write(const MatrixView& values, const MatrixView& tensor) {
  const int64_t count = tensor.rows * tensor.cols;
  Convert(DType::kF32, values.data, tensor.dtype, stored_.data(), count);
  return Copy(tensor.data, stored_.data(), count * SizeOf(tensor.dtype));
}

absl::StatusOr<KvCacheView> CudaObservation::ReadBlocks(const KvCacheView& cache) {
  const int64_t num_blocks = std::ssize(touched_.blocks);
  const int64_t bytes = BlockBytes(cache);
  LOCKSTEP_RETURN_IF_ERROR(Grow(blocks_, 2 * num_blocks * bytes));
  KvCacheView blocks = cache;
  blocks.keys = blocks_.data();
  blocks.values = blocks_.as<char>() + num_blocks * bytes;
  blocks.num_blocks = num_blocks;
  for (int64_t i = 0; i < num_blocks; ++i) {
    const int64_t from = touched_.blocks[static_cast<size_t>(i)] * bytes;
    LOCKSTEP_RETURN_IF_ERROR(CopyAsync(static_cast<char*>(blocks.keys) + i * bytes,
                                       static_cast<char*>(cache.keys) + from, bytes, stream_));
    LOCKSTEP_RETURN_IF_ERROR(CopyAsync(static_cast<char*>(blocks.values) + i * bytes,
                                       static_cast<char*>(cache.values) + from, bytes, stream_));
  }
  LOCKSTEP_RETURN_IF_ERROR(Synchronize(stream_));
  return blocks;
}

absl::Status CudaObservation::WriteBlocks(const KvCacheView& blocks, const KvCacheView& cache) {
  const int64_t bytes = BlockBytes(cache);
  for (int64_t i = 0; i < blocks.num_blocks; ++i) {
    const int64_t to = touched_.blocks[static_cast<size_t>(i)] * bytes;
    LOCKSTEP_RETURN_IF_ERROR(CopyAsync(static_cast<char*>(cache.keys) + to,
                                       static_cast<char*>(blocks.keys) + i * bytes, bytes,
                                       stream_));
    LOCKSTEP_RETURN_IF_ERROR(CopyAsync(static_cast<char*>(cache.values) + to,
                                       static_cast<char*>(blocks.values) + i * bytes, bytes,
                                       stream_));
  }
  return Synchronize(stream_);
}

absl::Status CudaObservation::Copy(void* to, const void* from, int64_t bytes) {
  LOCKSTEP_RETURN_IF_ERROR(CopyAsync(to, from, bytes, stream_));
  return Synchronize(stream_);
}

}  // namespace lockstep
