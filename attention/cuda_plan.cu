// Cuts a step's decode requests into work items, once for each window. One block a window; a thread
// a request, an exclusive sum over their part counts gives each its place.
#include "attention/cuda_device_code.cuh"
#include "attention/cuda_launch.cuh"

namespace lockstep {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;

__device__ int32_t CeilDivide(int32_t a, int32_t b) { return (a + b - 1) / b; }

struct Parts {
  int32_t first_key = 0;  // where the first part's tiles start
  int32_t lowest_key = 0;
  int32_t tiles = 0;
  int32_t count = 0;  // 0: not a decode request

  // Of 17 tiles, 4 parts have 5, 4, 4 and 4.
  __device__ int32_t FirstTile(int32_t part) const {
    return part * (tiles / count) + min(part, tiles % count);
  }
};

__device__ Parts CutRequest(const PlanParams& p, int32_t request, int32_t window) {
  Parts parts;
  if (p.query_start_loc[request + 1] - p.query_start_loc[request] != 1) return parts;
  const int32_t seq_len = p.seq_lens[request];
  parts.lowest_key = window > 0 && seq_len > window ? seq_len - window : 0;
  parts.first_key = parts.lowest_key / kFirstKeyMultiple * kFirstKeyMultiple;
  const int32_t keys = seq_len - parts.first_key;
  parts.tiles = CeilDivide(keys, kDecodeKeyTile);
  const float of_least_size = static_cast<float>(keys) / static_cast<float>(p.min_split_keys);
  const float count =
      of_least_size <= kPartsOfLeastSize ? of_least_size : sqrtf(kPartsOfLeastSize * of_least_size);
  parts.count = max(1, min(static_cast<int32_t>(count + 0.5f), min(p.max_splits, parts.tiles)));
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

// How many parts a run may have. A step takes as long as the busiest block, whose parts are counted
// here as if all rows had the mean number. Whole rows are best: nothing of them goes through
// memory. They are taken where the busiest block has at most a quarter more to do than with each
// part for itself; else the longest runs with which it has no more.
__device__ int32_t PartsOfRun(const PlanParams& p, int32_t window) {
  int32_t rows = 0;
  int32_t parts = 0;
  for (int32_t first = 0; first < p.num_requests; first += kThreads) {
    const int32_t request = first + static_cast<int32_t>(threadIdx.x);
    const int32_t count = request < p.num_requests ? CutRequest(p, request, window).count : 0;
    int32_t total;
    ExclusiveSum(count, &total);
    parts += total;
    rows += __syncthreads_count(count > 0);
  }
  if (rows == 0) return 1;
  const auto busiest = [&](int32_t runs, int32_t parts_of_run) {
    return CeilDivide(runs * p.num_head_tiles, p.num_blocks) * parts_of_run;
  };
  const int32_t least = busiest(parts, 1);
  const int32_t mean = CeilDivide(parts, rows);
  // A row much longer than the others is not left to one block.
  if (busiest(rows, mean) <= least + least / 4) return max(mean, 2 * least);
  for (int32_t runs = 2; runs < mean; ++runs) {
    const int32_t parts_of_run = CeilDivide(mean, runs);
    if (busiest(rows * runs, parts_of_run) <= least) return parts_of_run;
  }
  return 1;
}

__global__ void __launch_bounds__(kThreads) PlanKernel(PlanParams p) {
  AllowSuccessor();
  WaitForPredecessor();
  const int32_t window = p.windows[blockIdx.x];
  char* const plan = p.plans + blockIdx.x * p.plan_stride_bytes;
  auto* const header = reinterpret_cast<DecodePlanHeader*>(plan);
  auto* const items = reinterpret_cast<DecodeItem*>(header + 1);
  const int32_t most_parts = PartsOfRun(p, window);
  int32_t done = 0;
  for (int32_t first = 0; first < p.num_requests; first += kThreads) {
    const int32_t request = first + static_cast<int32_t>(threadIdx.x);
    Parts parts;
    if (request < p.num_requests) parts = CutRequest(p, request, window);
    const int32_t num_runs = CeilDivide(parts.count, most_parts);
    int32_t total;
    const int32_t place = done + ExclusiveSum(num_runs, &total);
    done += total;
    for (int32_t run = 0; run < num_runs; ++run) {
      // Of runs whose lengths differ by one at most.
      const int32_t split = static_cast<int32_t>(int64_t{run} * parts.count / num_runs);
      const int32_t end = static_cast<int32_t>(int64_t{run + 1} * parts.count / num_runs);
      DecodeItem item = {};
      item.request = request;
      item.row = p.query_start_loc[request];
      item.table_row = p.table_rows != nullptr ? p.table_rows[request] : request;
      item.key_begin =
          max(parts.lowest_key, parts.first_key + parts.FirstTile(split) * kDecodeKeyTile);
      item.key_end =
          min(p.seq_lens[request], parts.first_key + parts.FirstTile(end) * kDecodeKeyTile);
      item.first_split = split;
      item.num_splits = parts.count;
      item.part_tiles = max(1, parts.tiles / parts.count);  // a padding request has no keys
      item.long_parts = max(0, parts.tiles % parts.count - split);
      item.num_runs = num_runs;
      items[place + run] = item;
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
