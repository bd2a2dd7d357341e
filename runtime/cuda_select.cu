// The best ids of a row, and the sum of its exponentials.
#include "runtime/core/cuda_errors.h"
#include "runtime/cuda_sampling_device.cuh"

namespace lockstep {

namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
// Of a part, the ids that are told apart by sorting; of a row, those of all parts.
constexpr int kListed = 1024;
constexpr int kMerged = 2048;
static_assert(kMaxSelected <= kThreads && kSelectParts * kMaxSelected <= kMerged);

// Bitonic: the first `size` (a power of two) of `list`, falling. All threads; ends at a barrier.
__device__ void SortFalling(uint64_t* list, int size) {
  for (int run = 2; run <= size; run *= 2) {
    for (int stride = run / 2; stride > 0; stride /= 2) {
      __syncthreads();
      for (int i = threadIdx.x; i < size / 2; i += kThreads) {
        const int at = 2 * i - (i & (stride - 1));
        const uint64_t a = list[at];
        const uint64_t b = list[at + stride];
        if (((at & run) == 0) == (a < b)) list[at] = b, list[at + stride] = a;
      }
    }
  }
  __syncthreads();
}
__device__ int PowerOfTwoFrom(int count) {
  int size = 2;
  while (size < count) size *= 2;
  return size;
}

// A block's part of a row.
struct Part {
  RowVectors vectors;
  VectorRange range;
  int32_t first_id;

  // Calls fn(logit, id) for the thread's columns, by rising id.
  template <typename Fn>
  __device__ __forceinline__ void ForEach(const Fn& fn) const {
    for (int32_t v = range.begin + static_cast<int32_t>(threadIdx.x); v < range.end;
         v += kThreads) {
      float x[4];
      vectors.Load(v, range.end, x);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int32_t column = vectors.FirstColumn(v) + i;
        if (vectors.Holds(column)) fn(x[i], first_id + column);
      }
    }
  }
};

// The number of ids from `bar` on; the first kListed that come are listed. All threads.
__device__ int List(const Part& part, uint64_t bar, uint64_t* list, int* count) {
  __syncthreads();
  if (threadIdx.x == 0) *count = 0;
  __syncthreads();
  part.ForEach([&](float x, int32_t id) {
    const uint64_t rank = RankOf(x, id);
    if (rank < bar) return;
    const int place = atomicAdd(count, 1);
    if (place < kListed) list[place] = rank;
  });
  __syncthreads();
  return *count;
}

// The `wanted` best of the part, best first, then 0s, at the front of `list`. bars: the threads'
// largest keys, falling: the wanted-th is one that at least so many ids reach, and few more unless
// there are many ties.
__device__ void SelectPart(const Part& part, int wanted, uint64_t* list, int* count) {
  const uint64_t max_key = list[0];
  uint64_t low = list[wanted - 1] > 0 ? list[wanted - 1] << 32 : 1;
  int listed = List(part, low, list, count);
  for (uint64_t high = (max_key + 1) << 32; listed > kListed;) {
    const uint64_t middle = low + (high - low) / 2;
    const int more = List(part, middle, list, count);
    if (more > kListed) {
      low = middle;
    } else if (more < wanted) {
      high = middle;
    } else {
      listed = more;
    }
  }
  const int size = PowerOfTwoFrom(max(listed, wanted));
  for (int i = listed + static_cast<int>(threadIdx.x); i < size; i += kThreads) list[i] = 0;
  SortFalling(list, size);
}

// Sum of exp(x - max), each thread's columns and then the threads' sums in a fixed order.
__device__ double SumExponentials(const Part& part, float max, double* warp_sums) {
  double sum = 0;
  if (max > MinusInfinity()) {
    part.ForEach([&](float x, int32_t) { sum += exp(static_cast<double>(x) - max); });
  }
  for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(kAllLanes, sum, lanes);
  if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = 0;
  for (int warp = 0; warp < kWarps; ++warp) sum += warp_sums[warp];
  return sum;
}

// The parts' sums, in their order.
__device__ SelectedPart MergeParts(const SelectedPart* parts) {
  SelectedPart merged;
  merged.max = MinusInfinity();
  for (int p = 0; p < kSelectParts; ++p) {
    merged.max = fmaxf(merged.max, __ldcg(&parts[p].max));
    merged.bad |= __ldcg(&parts[p].bad);
  }
  for (int p = 0; p < kSelectParts; ++p) {
    const float max = __ldcg(&parts[p].max);
    if (max == MinusInfinity()) continue;
    merged.sum += __ldcg(&parts[p].sum) * exp(static_cast<double>(max) - merged.max);
  }
  return merged;
}

__device__ void WriteSummary(const SamplingStep& step, const DeviceRow& row, const uint64_t* list,
                             const SelectedPart& merged) {
  if (threadIdx.x == 0) {
    LogitSum& sum = reinterpret_cast<LogitSum*>(step.message + step.layout.sums)[row.sum_index];
    sum.sum = merged.sum;
    sum.max = merged.bad != 0 ? NAN : merged.max;
  }
  auto* const top = reinterpret_cast<LogitAndId*>(step.message + step.layout.tops) + row.first_top;
  for (int i = threadIdx.x; i < row.num_logprobs; i += kThreads) {
    top[i].logit = list[i] != 0 ? LogitOfRank(list[i]) : MinusInfinity();
    top[i].id = list[i] != 0 ? IdOfRank(list[i]) : -1;
  }
}

__device__ void WriteCandidates(const SamplingStep& step, const DeviceRow& row, int64_t row_index,
                                const uint64_t* list, const SelectedPart& merged) {
  if (threadIdx.x == 0) {
    Candidate& best = reinterpret_cast<Candidate*>(step.message + sizeof(MessageHeader))[row_index];
    best.score = -INFINITY;
    best.logit = merged.bad != 0 ? MinusInfinity() : merged.max;
    best.raw = 0;
    best.id = merged.bad != 0 ? kBadRow : -1;
  }
  auto* const candidates =
      reinterpret_cast<Candidate*>(step.message + step.layout.candidates) + row.first_candidate;
  for (int i = threadIdx.x; i < row.top_k; i += kThreads) {
    const float logit = list[i] != 0 ? LogitOfRank(list[i]) : MinusInfinity();
    const int32_t id = logit > MinusInfinity() ? IdOfRank(list[i]) : -1;
    float raw = logit;
    const int32_t column = id - static_cast<int32_t>(step.vocab.begin);
    for (int j = 0; row.num_logprobs >= 0 && j < row.num_adjustments; ++j) {
      const DeviceAdjustment& adjustment = step.adjustments[row.first_adjustment + j];
      if (adjustment.column == column) raw = adjustment.raw;
    }
    candidates[i].score = id >= 0 ? ScoreOf(row, logit, id) : -INFINITY;
    candidates[i].logit = logit;
    candidates[i].raw = raw;
    candidates[i].id = id;
  }
}

// Block b takes part b % kSelectParts of row b / kSelectParts; the last block of a row merges.
// kRaw: the raw logits of rows with log probabilities; else rows of kCandidates.
template <bool kRaw>
__global__ void __launch_bounds__(kThreads) SelectTopKernel(SamplingStep step) {
  __shared__ uint64_t list[kMerged];
  __shared__ double warp_sums[kWarps];
  __shared__ int count;
  __shared__ bool is_last;
  WriteHeader(step);
  const int64_t row_index = blockIdx.x / kSelectParts;
  const int part_index = static_cast<int>(blockIdx.x % kSelectParts);
  const DeviceRow row = step.rows[row_index];
  if (kRaw ? row.num_logprobs < 0 : row.kind != DeviceRowKind::kCandidates) return;
  const int wanted = kRaw ? row.num_logprobs : row.top_k;
  const RowVectors vectors = VectorsOf(step, row);
  const Part part{vectors, PartOf(vectors, part_index, kSelectParts),
                  static_cast<int32_t>(step.vocab.begin)};
  uint32_t largest = 0;
  bool bad = false;
  part.ForEach([&](float x, int32_t) {
    largest = max(largest, KeyOf(x));
    bad |= !(x <= FLT_MAX);
  });
  list[threadIdx.x] = largest;
  SelectedPart mine;
  mine.bad = __syncthreads_or(bad ? 1 : 0) != 0 ? 1 : 0;
  SortFalling(list, kThreads);
  mine.max =
      list[0] == 0 || mine.bad != 0 ? MinusInfinity() : FromKey(static_cast<uint32_t>(list[0]));
  if (kRaw) mine.sum = SumExponentials(part, mine.max, warp_sums);
  uint64_t* const row_list =
      step.selected + int64_t{kRaw ? row.first_top : row.first_candidate} * kSelectParts;
  if (wanted > 0 && mine.bad == 0) {
    SelectPart(part, wanted, list, &count);
    for (int i = threadIdx.x; i < wanted; i += kThreads) {
      row_list[part_index * wanted + i] = list[i];
    }
  } else {
    for (int i = threadIdx.x; i < wanted; i += kThreads) row_list[part_index * wanted + i] = 0;
  }
  SelectedPart* const parts = step.selected_parts + row_index * kSelectParts;
  if (threadIdx.x == 0) parts[part_index] = mine;
  if (!ArrivesLast(&step.arrivals[row_index], kSelectParts, &is_last)) return;
  const int merged_size = PowerOfTwoFrom(kSelectParts * wanted);
  for (int i = threadIdx.x; i < merged_size; i += kThreads) {
    list[i] = i < kSelectParts * wanted ? __ldcg(row_list + i) : 0;
  }
  SortFalling(list, merged_size);
  const SelectedPart merged = MergeParts(parts);
  if (kRaw) {
    WriteSummary(step, row, list, merged);
  } else {
    WriteCandidates(step, row, row_index, list, merged);
  }
}

}  // namespace

absl::Status SummariseLogits(const SamplingStep& step, CudaStream stream) {
  const auto blocks = static_cast<unsigned>(step.num_rows * kSelectParts);
  SelectTopKernel<true><<<blocks, kThreads, 0, stream>>>(step);
  LOCKSTEP_CUDA_LAUNCHED("SummariseLogits");
  return absl::OkStatus();
}

absl::Status SelectCandidates(const SamplingStep& step, CudaStream stream) {
  const auto blocks = static_cast<unsigned>(step.num_rows * kSelectParts);
  SelectTopKernel<false><<<blocks, kThreads, 0, stream>>>(step);
  LOCKSTEP_CUDA_LAUNCHED("SelectCandidates");
  return absl::OkStatus();
}

}  // namespace lockstep
