#include "cache/kv_pool.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <string>

#include "runtime/core/status.h"

namespace lockstep {
namespace {

void FillNan(DType dtype, void* data, int64_t offset, int64_t count) {
  switch (dtype) {  // quiet NaNs of the formats
    case DType::kF32:
      std::fill_n(static_cast<uint32_t*>(data) + offset, count, 0x7fc00000u);
      return;
    case DType::kF16:
      std::fill_n(static_cast<uint16_t*>(data) + offset, count, uint16_t{0x7e00});
      return;
    case DType::kBF16:
      std::fill_n(static_cast<uint16_t*>(data) + offset, count, uint16_t{0x7fc0});
      return;
    case DType::kF8E4M3:
      std::fill_n(static_cast<uint8_t*>(data) + offset, count, uint8_t{0x7f});
      return;
  }
}

// Bytes of the whole pool; false when they do not fit int64.
bool TotalBytes(const KvPoolShape& shape, int64_t num_blocks, int64_t* bytes) {
  *bytes = 2 * SizeOf(shape.dtype);
  for (int64_t factor :
       {shape.num_layers, shape.num_kv_heads, shape.block_size, shape.head_dim, num_blocks}) {
    if (__builtin_mul_overflow(*bytes, factor, bytes)) return false;
  }
  return true;
}

absl::Status CheckSize(const KvPoolShape& shape, int64_t num_blocks, int64_t* bytes) {
  if (std::min({shape.num_layers, shape.num_kv_heads, shape.head_dim, shape.block_size,
                num_blocks}) < 1) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "KV pool: every size must be at least 1, got %d layers, %d KV heads, head_dim %d, block "
        "size %d, %d blocks",
        shape.num_layers, shape.num_kv_heads, shape.head_dim, shape.block_size, num_blocks));
  }
  if (num_blocks > std::numeric_limits<int32_t>::max() || !TotalBytes(shape, num_blocks, bytes)) {
    return absl::ResourceExhaustedError(
        absl::StrFormat("KV pool: %d blocks are more than can be addressed", num_blocks));
  }
  return absl::OkStatus();
}

std::string Describe(const KvPoolShape& shape, int64_t num_blocks) {
  return absl::StrFormat("KV cache of %d blocks of %d tokens", num_blocks, shape.block_size);
}

}  // namespace

absl::StatusOr<KvPool> KvPool::Create(const KvPoolShape& shape, int64_t num_blocks) {
  int64_t bytes = 0;
  LOCKSTEP_RETURN_IF_ERROR(CheckSize(shape, num_blocks, &bytes));
  KvPool pool;
  pool.shape_ = shape;
  pool.num_blocks_ = num_blocks;
  pool.scales_.resize(static_cast<size_t>(shape.num_layers));
  LOCKSTEP_ASSIGN_OR_RETURN(pool.storage_, Buffer::Create(bytes, Describe(shape, num_blocks)));
  return pool;
}

absl::StatusOr<KvPool> KvPool::CreateOnCuda(const KvPoolShape& shape, int64_t num_blocks,
                                            CudaStream stream) {
  int64_t bytes = 0;
  LOCKSTEP_RETURN_IF_ERROR(CheckSize(shape, num_blocks, &bytes));
  KvPool pool;
  pool.shape_ = shape;
  pool.num_blocks_ = num_blocks;
  pool.scales_.resize(static_cast<size_t>(shape.num_layers));
  pool.on_cuda_ = true;
  pool.stream_ = stream;
  LOCKSTEP_ASSIGN_OR_RETURN(pool.cuda_storage_,
                            DeviceBuffer::Create(bytes, Describe(shape, num_blocks)));
  return pool;
}

KvCacheView KvPool::Layer(int64_t layer) const {
  LOCKSTEP_CHECK(layer >= 0 && layer < shape_.num_layers);
  // Storage is [L, 2 (keys, values), num_blocks, Hkv_local, P, D].
  const int64_t half_bytes = shape_.BytesPerBlock() / (2 * shape_.num_layers) * num_blocks_;
  KvCacheView view;
  view.keys = static_cast<char*>(data()) + 2 * layer * half_bytes;
  view.values = static_cast<char*>(view.keys) + half_bytes;
  view.dtype = shape_.dtype;
  view.num_blocks = num_blocks_;
  view.num_kv_heads = shape_.num_kv_heads;
  view.block_size = shape_.block_size;
  view.head_dim = shape_.head_dim;
  view.k_scale = scales_[layer].keys;
  view.v_scale = scales_[layer].values;
  return view;
}

void KvPool::SetScales(int64_t layer, float k_scale, float v_scale) {
  LOCKSTEP_CHECK(shape_.dtype == DType::kF8E4M3 && layer >= 0 && layer < shape_.num_layers);
  LOCKSTEP_CHECK(k_scale > 0 && v_scale > 0);
  scales_[layer] = {k_scale, v_scale};
}

absl::Status KvPool::Poison(int64_t block) {
  LOCKSTEP_CHECK(block >= 0 && block < num_blocks_);
  const int64_t count = shape_.num_kv_heads * shape_.block_size * shape_.head_dim;
  for (int64_t layer = 0; layer < shape_.num_layers; ++layer) {
    const KvCacheView view = Layer(layer);
    const int64_t offset = view.Offset(block, 0, 0);
    for (void* half : {view.keys, view.values}) {
      if (on_cuda_) {  // all bits set are a NaN in every format
        const int64_t element = SizeOf(view.dtype);
        LOCKSTEP_RETURN_IF_ERROR(FillBytesAsync(static_cast<char*>(half) + offset * element, 0xff,
                                                count * element, stream_));
      } else {
        FillNan(view.dtype, half, offset, count);
      }
    }
  }
  return absl::OkStatus();
}

absl::Status KvPool::Copy(int64_t source, int64_t target) {
  LOCKSTEP_CHECK(source >= 0 && source < num_blocks_ && target >= 0 && target < num_blocks_);
  const int64_t bytes = shape_.BytesPerBlock() / (2 * shape_.num_layers);
  for (int64_t layer = 0; layer < shape_.num_layers; ++layer) {
    const KvCacheView view = Layer(layer);
    for (void* half : {view.keys, view.values}) {
      char* const base = static_cast<char*>(half);
      if (on_cuda_) {
        LOCKSTEP_RETURN_IF_ERROR(
            CopyAsync(base + target * bytes, base + source * bytes, bytes, stream_));
      } else {
        std::memcpy(base + target * bytes, base + source * bytes, static_cast<size_t>(bytes));
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace lockstep
