// What the prefill kernels share: which rows a block has, and what they see.
#pragma once

#include "attention/cuda_device_code.cuh"

namespace lockstep {

// A row tile: rows of one request and one KV head. Queries of a KV head's group lie packed, token
// by token: row m is token m / group, head first_head + m % group. So groups of any size fill
// tiles, and a tile's tokens are close together.
struct RowTile {
  int32_t request = -1;  // -1: nothing to do
  int32_t first_row = 0;
  int32_t num_rows = 0;
  int32_t group = 0;
  int32_t first_head = 0;
  int32_t first_token = 0;     // the request's first row of the step
  int32_t first_position = 0;  // of that token
  int32_t seq_len = 0;

  __device__ int32_t Position(int32_t row) const { return first_position + row / group; }
};

// Tile numbers: request b has the numbers from query_start_loc[b] * group / kRows + b up to that of
// b + 1, which is enough for its rows, and some may be empty. So nothing but query_start_loc is
// needed to find the request of a tile, and T * group / kRows + B numbers are enough for all.
template <int kRows>
__device__ RowTile FindRowTile(const PrefillParams& p, int32_t tile, int32_t kv_head, int threads) {
  __shared__ int32_t found;
  if (threadIdx.x == 0) found = -1;
  __syncthreads();
  RowTile result;
  result.first_head = p.first_head[kv_head];
  result.group = p.first_head[kv_head + 1] - result.first_head;
  const auto first_tile = [&](int32_t b) {
    return static_cast<int32_t>(int64_t{p.query_start_loc[b]} * result.group / kRows) + b;
  };
  for (int32_t b = threadIdx.x; b < p.num_requests; b += threads) {
    if (first_tile(b) <= tile && tile < first_tile(b + 1)) found = b;
  }
  __syncthreads();
  const int32_t b = found;
  if (b < 0) return result;
  result.first_token = p.query_start_loc[b];
  const int32_t query_len = p.query_start_loc[b + 1] - result.first_token;
  result.seq_len = p.seq_lens[b];
  result.first_position = result.seq_len - query_len;
  result.first_row = (tile - first_tile(b)) * kRows;
  result.num_rows = min(kRows, query_len * result.group - result.first_row);
  // One row is decode's; see CudaAttentionBatch for length 0.
  if (query_len > 1 && result.num_rows > 0) result.request = b;
  return result;
}

inline __device__ int32_t LowestVisible(int32_t position, int32_t window) {
  return window > 0 && position >= window ? position - window + 1 : 0;
}

}  // namespace lockstep
