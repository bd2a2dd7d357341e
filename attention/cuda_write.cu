// Keys and values of new tokens to their slots. A thread moves 8 elements of one head of one token,
// of the keys or of the values; 16-byte accesses where types and alignment allow it. Scales are 1
// but for an fp8 cache: dividing by 1 changes nothing.
#include "attention/cuda_device_code.cuh"
#include "attention/cuda_launch.cuh"

namespace lockstep {
namespace {

constexpr int kThreads = 256;
constexpr int kElements = 8;

template <typename From, typename To, bool kVector>
__global__ void __launch_bounds__(kThreads) WriteKvKernel(WriteKvParams p) {
  AllowSuccessor();
  WaitForPredecessor();
  const int32_t chunks = (p.head_dim + kElements - 1) / kElements;
  const int64_t per_token = int64_t{2} * p.num_kv_heads * chunks;
  const int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (index >= p.num_tokens * per_token) return;
  const int64_t token = index / per_token;
  const int32_t rest = static_cast<int32_t>(index % per_token);
  const int32_t first = rest % chunks * kElements;
  const int32_t head = rest / chunks % p.num_kv_heads;
  const bool is_value = rest / chunks >= p.num_kv_heads;
  const int64_t slot = p.slot_mapping[token];
  if (slot < 0) return;
  const From* const from = static_cast<const From*>(is_value ? p.values : p.keys) +
                           token * p.row_stride + head * p.head_dim + first;
  const int64_t row =
      (slot / p.block_size * p.num_kv_heads + head) * p.block_size + slot % p.block_size;
  To* const to =
      static_cast<To*>(is_value ? p.cache_values : p.cache_keys) + row * p.head_dim + first;
  if constexpr (kVector) {
    *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
  } else {
    for (int32_t i = 0; i < kElements && first + i < p.head_dim; ++i) {
      to[i] = FromFloat<To>(AsFloat(from[i]) / (is_value ? p.v_scale : p.k_scale));
    }
  }
}

bool Aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

template <typename From, typename To>
absl::Status Launch(const WriteKvParams& p, bool programmatic, CudaStream stream) {
  const int64_t chunks = (p.head_dim + kElements - 1) / kElements;
  const int64_t threads = int64_t{2} * p.num_tokens * p.num_kv_heads * chunks;
  const dim3 grid(static_cast<unsigned>((threads + kThreads - 1) / kThreads));
  if (grid.x == 0) return absl::OkStatus();
  bool vector = false;
  if constexpr (sizeof(From) == 2 && std::is_same_v<From, To>) {
    vector = p.head_dim % kElements == 0 && p.row_stride % kElements == 0 && Aligned(p.keys) &&
             Aligned(p.values) && Aligned(p.cache_keys) && Aligned(p.cache_values);
    if (vector) {
      return LaunchKernel(WriteKvKernel<From, To, true>, grid, kThreads, 0, p, programmatic, stream,
                          "launch of the KV write");
    }
  }
  return LaunchKernel(WriteKvKernel<From, To, false>, grid, kThreads, 0, p, programmatic, stream,
                      "launch of the KV write");
}

template <typename From>
absl::Status LaunchFrom(const WriteKvParams& p, DType to, bool programmatic, CudaStream stream) {
  switch (to) {
    case DType::kF32:
      return Launch<From, float>(p, programmatic, stream);
    case DType::kF16:
      return Launch<From, __half>(p, programmatic, stream);
    case DType::kBF16:
      return Launch<From, __nv_bfloat16>(p, programmatic, stream);
    case DType::kF8E4M3:
      return Launch<From, __nv_fp8_e4m3>(p, programmatic, stream);
  }
  LOCKSTEP_CHECK(false);
}

}  // namespace

absl::Status LaunchWriteKv(const WriteKvParams& params, DType from, DType to, bool programmatic,
                           CudaStream stream) {
  switch (from) {
    case DType::kF32:
      return LaunchFrom<float>(params, to, programmatic, stream);
    case DType::kF16:
      return LaunchFrom<__half>(params, to, programmatic, stream);
    case DType::kBF16:
      return LaunchFrom<__nv_bfloat16>(params, to, programmatic, stream);
    case DType::kF8E4M3:
      break;
  }
  LOCKSTEP_CHECK(false);
}

}  // namespace lockstep
