// Cuts a step's decode requests into work items, once for each window. One block a window; a thread
// a request, an exclusive sum over their part counts gives each its place.
#include "attention/cuda_device_code.cuh"
#include "attention/cuda_launch.cuh"

namespace lockstep {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;

struct Parts {
  int32_t first_key = 0;  // where the first part's tiles start
  int32_t lowest_key = 0;
  int32_t part_keys = 0;
  int32_t count = 0;  // 0: not a decode request
};

__device__ Parts CutRequest(const PlanParams& p, int32_t request, int32_t window) {
  Parts parts;
  if (p.query_start_loc[request + 1] - p.query_start_loc[request] != 1) return parts;
  const int32_t seq_len = p.seq_lens[request];
  parts.lowest_key = window > 0 && seq_len > window ? seq_len - window : 0;
  parts.first_key = parts.lowest_key / kFirstKeyMultiple * kFirstKeyMultiple;
  const int32_t keys = seq_len - parts.first_key;
  const int32_t multiples =
      ((keys + p.max_splits - 1) / p.max_splits + kDecodeKeyTile - 1) / kDecodeKeyTile;
  int32_t growth = 1;
  while (int64_t{growth} * growth * kPartsOfLeastSize * p.min_split_keys < keys) ++growth;
  parts.part_keys = max(growth * p.min_split_keys, multiples * kDecodeKeyTile);
  parts.count = max(1, (keys + parts.part_keys - 1) / parts.part_keys);
  return parts;
}

// Sum of `value` over the threads before this one; `*total` is that of all.
__device__ int32_t ExclusiveSum(int32_t value, int32_t* total) {
  __shared__ int32_t warp_sums[kWarps];
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  int32_t sum = value;
  for (int step = 1; step < 32; step *= 2) {
    const int32_t other = __shfl_up_sync(kFullWarp, sum, step);
    if (lane >= step) sum += other;
  }
  __syncthreads();  // warp_sums of the previous call have been read
  if (lane == 31) warp_sums[warp] = sum;
  __syncthreads();
  int32_t before = 0;
  int32_t all = 0;
  for (int i = 0; i < kWarps; ++i) {
    if (i < warp) before += warp_sums[i];
    all += warp_sums[i];
  }
  *total = all;
  return before + sum - value;
}

__global__ void __launch_bounds__(kThreads) PlanKernel(PlanParams p) {
  AllowSuccessor();
  WaitForPredecessor();
  const int32_t window = p.windows[blockIdx.x];
  char* const plan = p.plans + blockIdx.x * p.plan_stride_bytes;
  auto* const header = reinterpret_cast<DecodePlanHeader*>(plan);
  auto* const items = reinterpret_cast<DecodeItem*>(header + 1);
  int32_t done = 0;
  for (int32_t first = 0; first < p.num_requests; first += kThreads) {
    const int32_t request = first + static_cast<int32_t>(threadIdx.x);
    Parts parts;
    if (request < p.num_requests) parts = CutRequest(p, request, window);
    int32_t total;
    const int32_t place = done + ExclusiveSum(parts.count, &total);
    done += total;
    for (int32_t split = 0; split < parts.count; ++split) {
      DecodeItem item = {};
      item.request = request;
      item.row = p.query_start_loc[request];
      item.table_row = p.table_rows != nullptr ? p.table_rows[request] : request;
      item.key_begin = max(parts.lowest_key, parts.first_key + split * parts.part_keys);
      item.key_end = min(p.seq_lens[request], parts.first_key + (split + 1) * parts.part_keys);
      item.split = split;
      item.num_splits = parts.count;
      items[place + split] = item;
    }
  }
  if (threadIdx.x == 0) {
    header->num_items = done;
    header->num_rows = p.query_start_loc[p.num_requests];
  }
}

}  // namespace

absl::Status LaunchPlan(const PlanParams& params, bool programmatic, CudaStream stream) {
  return LaunchKernel(PlanKernel, dim3(static_cast<unsigned>(params.num_windows)), kThreads, 0,
                      params, programmatic, stream, "launch of the attention plan");
}

}  // namespace lockstep
