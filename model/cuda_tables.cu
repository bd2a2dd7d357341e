#include "model/cuda_tables.h"
#include "runtime/core/cuda_errors.h"

namespace lockstep {

namespace {

constexpr int kThreads = 128;

// One block a run. The blocks of a run begin after those of the runs before it.
__global__ void ApplyRuns(const BlockTableRun* runs, const int32_t* blocks, int32_t* tables,
                          int64_t max_blocks) {
  __shared__ int first_block;
  const int run_index = blockIdx.x;
  if (threadIdx.x == 0) first_block = 0;
  __syncthreads();
  int before = 0;
  for (int i = threadIdx.x; i < run_index; i += kThreads) before += runs[i].count;
  if (before != 0) atomicAdd(&first_block, before);
  __syncthreads();
  const BlockTableRun run = runs[run_index];
  int32_t* const table = tables + run.slot * max_blocks + run.first_index;
  for (int i = threadIdx.x; i < run.count; i += kThreads) table[i] = blocks[first_block + i];
}

__global__ void PutTokens(const int32_t* last_tokens, int32_t* token_ids, int64_t count) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= count) return;
  const int32_t id = token_ids[i];
  if (id < 0) token_ids[i] = last_tokens[-1 - id];
}

}  // namespace

absl::Status ApplyTableRuns(const BlockTableRun* runs, int64_t num_runs, const int32_t* blocks,
                            int32_t* tables, int64_t max_blocks, CudaStream stream) {
  if (num_runs == 0) return absl::OkStatus();
  ApplyRuns<<<static_cast<unsigned>(num_runs), kThreads, 0, stream>>>(runs, blocks, tables,
                                                                      max_blocks);
  LOCKSTEP_CUDA_LAUNCHED("ApplyRuns");
  return absl::OkStatus();
}

absl::Status PutLastTokens(const int32_t* last_tokens, int32_t* token_ids, int64_t count,
                           CudaStream stream) {
  if (count == 0) return absl::OkStatus();
  const auto blocks = static_cast<unsigned>((count + kThreads - 1) / kThreads);
  PutTokens<<<blocks, kThreads, 0, stream>>>(last_tokens, token_ids, count);
  LOCKSTEP_CUDA_LAUNCHED("PutTokens");
  return absl::OkStatus();
}

}  // namespace lockstep
