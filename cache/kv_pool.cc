#include "cache/kv_pool.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "runtime/core/status.h"

namespace lockstep {
namespace {

// Quiet NaNs of the three formats.
constexpr uint32_t kNanF32 = 0x7fc00000u;
constexpr uint16_t kNanF16 = 0x7e00u;
constexpr uint16_t kNanBF16 = 0x7fc0u;

void FillNan(DType dtype, void* data, int64_t offset, int64_t count) {
  if (dtype == DType::kF32) {
    std::fill_n(static_cast<uint32_t*>(data) + offset, count, kNanF32);
  } else {
    const uint16_t nan = dtype == DType::kF16 ? kNanF16 : kNanBF16;
    std::fill_n(static_cast<uint16_t*>(data) + offset, count, nan);
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

}  // namespace

absl::StatusOr<KvPool> KvPool::Create(const KvPoolShape& shape, int64_t num_blocks) {
  if (shape.num_layers < 1 || shape.num_kv_heads < 1 || shape.head_dim < 1 ||
      shape.block_size < 1 || num_blocks < 1) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "KV pool: every size must be at least 1, got %d layers, %d KV heads, head_dim %d, block "
        "size %d, %d blocks",
        shape.num_layers, shape.num_kv_heads, shape.head_dim, shape.block_size, num_blocks));
  }
  int64_t bytes = 0;
  if (num_blocks > std::numeric_limits<int32_t>::max() || !TotalBytes(shape, num_blocks, &bytes)) {
    return absl::ResourceExhaustedError(
        absl::StrFormat("KV pool: %d blocks are more than can be addressed", num_blocks));
  }
  KvPool pool;
  pool.shape_ = shape;
  pool.num_blocks_ = num_blocks;
  LOCKSTEP_ASSIGN_OR_RETURN(
      pool.storage_, Buffer::Create(bytes, absl::StrFormat("KV cache of %d blocks of %d tokens",
                                                           num_blocks, shape.block_size)));
  return pool;
}

KvCacheView KvPool::Layer(int64_t layer) const {
  LOCKSTEP_CHECK(layer >= 0 && layer < shape_.num_layers);
  // Storage is [L, 2 (keys, values), num_blocks, Hkv_local, P, D].
  const int64_t half_bytes = shape_.BytesPerBlock() / (2 * shape_.num_layers) * num_blocks_;
  KvCacheView view;
  view.keys = storage_.as<char>() + 2 * layer * half_bytes;
  view.values = static_cast<char*>(view.keys) + half_bytes;
  view.dtype = shape_.dtype;
  view.num_blocks = num_blocks_;
  view.num_kv_heads = shape_.num_kv_heads;
  view.block_size = shape_.block_size;
  view.head_dim = shape_.head_dim;
  return view;
}

void KvPool::Poison(int64_t block) {
  LOCKSTEP_CHECK(block >= 0 && block < num_blocks_);
  const int64_t count = shape_.num_kv_heads * shape_.block_size * shape_.head_dim;
  for (int64_t layer = 0; layer < shape_.num_layers; ++layer) {
    const KvCacheView view = Layer(layer);
    FillNan(view.dtype, view.keys, view.Offset(block, 0, 0), count);
    FillNan(view.dtype, view.values, view.Offset(block, 0, 0), count);
  }
}

void KvPool::Copy(int64_t source, int64_t target) {
  LOCKSTEP_CHECK(source >= 0 && source < num_blocks_ && target >= 0 && target < num_blocks_);
  const int64_t bytes = shape_.BytesPerBlock() / (2 * shape_.num_layers);
  for (int64_t layer = 0; layer < shape_.num_layers; ++layer) {
    const KvCacheView view = Layer(layer);
    for (void* half : {view.keys, view.values}) {
      char* base = static_cast<char*>(half);
      std::memcpy(base + target * bytes, base + source * bytes, static_cast<size_t>(bytes));
    }
  }
}

}  // namespace lockstep
