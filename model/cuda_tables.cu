#include <algorithm>

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

struct StepArrays {
  StepArray at[kNumStepArrays];
};
// blockIdx.y: the array.
__global__ void PutArrays(StepArrays arrays, const int32_t* last_tokens) {
  const StepArray array = arrays.at[blockIdx.y];
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= array.num_words) return;
  const int32_t word = array.from[i];
  array.to[i] = blockIdx.y == 0 && word < 0 ? last_tokens[-1 - word] : word;
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

absl::Status PutStepArrays(const StepArray (&arrays)[kNumStepArrays], const int32_t* last_tokens,
                           CudaStream stream) {
  StepArrays all;
  int64_t most = 0;
  for (int i = 0; i < kNumStepArrays; ++i) {
    all.at[i] = arrays[i];
    most = std::max(most, arrays[i].num_words);
  }
  if (most == 0) return absl::OkStatus();
  const dim3 grid(static_cast<unsigned>((most + kThreads - 1) / kThreads), kNumStepArrays);
  PutArrays<<<grid, kThreads, 0, stream>>>(all, last_tokens);
  LOCKSTEP_CUDA_LAUNCHED("PutArrays");
  return absl::OkStatus();
}

}  // namespace lockstep
