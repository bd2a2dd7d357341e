// Compiled with -fmad=false: what host code rounds twice is rounded twice here.
#include <algorithm>
#include <cfloat>

#include "runtime/core/cuda_errors.h"
#include "runtime/cuda_sampling.h"
#include "runtime/random_bits.h"
#include "runtime/sampler.h"

namespace lockstep {

namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr unsigned kAllLanes = ~0u;
// Vectors of four logits that a thread loads at once.
constexpr int kUnroll = 2;
constexpr int kLogitsAtOnce = 4 * kUnroll;
constexpr double kLn2 = 0.69314718055994530942;

__device__ __forceinline__ float MinusInfinity() { return -INFINITY; }

// Larger score, then lower id; none (-1) is the highest id.
__device__ __forceinline__ bool Better(double score, int32_t id, double other_score,
                                       int32_t other_id) {
  return score > other_score ||
         (score == other_score && static_cast<uint32_t>(id) < static_cast<uint32_t>(other_id));
}

// As GumbelNoise.
__device__ __noinline__ double NoiseOf(uint64_t bits) {
  const double e = (static_cast<double>(bits >> 11) + 0.5) * 0x1p-53;
  return -log(-log1p(-e));
}
// At least NoiseOf; see GumbelBound in gumbel_race.cc.
__device__ __forceinline__ double NoiseBound(uint64_t bits) {
  const double e =
      __longlong_as_double(static_cast<long long>((bits >> 12) | 0x3ff0000000000000)) - 1.0;
  const double high = __hiloint2double(0x43300000, __double2hiint(e)) - 0x1p52;
  return (0x1p20 * 1023 - high) * (kLn2 * 0x1p-20) + 1e-9;
}

// The row in vectors of four that lie at multiples of 16 bytes: vector v holds the columns from
// 4 * v - lead on; those outside of the row read as -infinity.
struct RowVectors {
  const float* logits;
  int32_t size;
  int32_t lead;

  __device__ RowVectors(const float* row, int32_t count)
      : logits(row),
        size(count),
        lead(static_cast<int32_t>(reinterpret_cast<uintptr_t>(row) / sizeof(float) % 4)) {}
  __device__ int32_t count() const { return (lead + size + 3) / 4; }
  __device__ int32_t FirstColumn(int32_t v) const { return 4 * v - lead; }
  __device__ __forceinline__ void Load(int32_t v, int32_t end, float* x) const {
    const int32_t column = FirstColumn(v);
    if (v < end && column >= 0 && column + 4 <= size) {
      const float4 four = __ldcs(reinterpret_cast<const float4*>(logits + column));
      x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
      return;
    }
    for (int i = 0; i < 4; ++i) {
      const int32_t at = column + i;
      x[i] = v < end && at >= 0 && at < size ? logits[at] : MinusInfinity();
    }
  }
};

__device__ __forceinline__ void Offer(RowPart& best, double score, int32_t id) {
  if (Better(score, id, best.score, best.id)) best.score = score, best.id = id;
}
__device__ __forceinline__ void Merge(RowPart& part, const RowPart& other) {
  Offer(part, other.score, other.id);
  part.max = fmaxf(part.max, other.max);
  part.bad |= other.bad;
}

// What the warp's 32 * kLogitsAtOnce logits x, the lane's in columns of `first_id` on, do to
// a greedy row.
__device__ __forceinline__ void ScanGreedy(const float* x, const int32_t* ids, RowPart& best) {
#pragma unroll
  for (int i = 0; i < kLogitsAtOnce; ++i) {
    // Ids rise, so the first of equal logits has the lowest.
    if (x[i] > best.max) best.max = x[i], best.id = ids[i];
  }
}

// The Gumbel race. `bar`: the best score of the warp so far, the same in all lanes. A score is
// computed only where its bound reaches the bar: first that of the lane's highest bound, which
// raises the bar for the others.
__device__ __forceinline__ void ScanRace(const DeviceRow& row, const float* x, const int32_t* ids,
                                         RowPart& best, double& bar) {
  double reach[kLogitsAtOnce];
  double highest = -INFINITY;
#pragma unroll
  for (int i = 0; i < kLogitsAtOnce; ++i) {
    best.max = fmaxf(best.max, x[i]);
    const uint64_t bits = RandomBits(row.row_key, static_cast<uint64_t>(ids[i]));
    reach[i] = x[i] * row.inverse_temperature + NoiseBound(bits);
    // -infinity never wins; the rest of a bad row does not matter.
    if (!(x[i] >= -FLT_MAX)) reach[i] = -INFINITY;
    highest = fmax(highest, reach[i]);
  }
  if (!__any_sync(kAllLanes, highest >= bar && highest > -INFINITY)) return;
  const auto run = [&](float logit, int32_t id) {
    const double score = logit * row.inverse_temperature +
                         NoiseOf(RandomBits(row.row_key, static_cast<uint64_t>(id)));
    Offer(best, score, id);
  };
  for (int pass = 0; pass < 2; ++pass) {
    if (pass == 0) bar = highest;
#pragma unroll
    for (int i = 0; i < kLogitsAtOnce; ++i) {
      if (!(reach[i] >= bar) || reach[i] == -INFINITY) continue;
      run(x[i], ids[i]);
      reach[i] = -INFINITY;
    }
    bar = best.score;
    for (int lanes = 16; lanes > 0; lanes /= 2) {
      bar = fmax(bar, __shfl_xor_sync(kAllLanes, bar, lanes));
    }
  }
}

__device__ __forceinline__ RowPart ReduceBlock(RowPart part, RowPart* warps) {
  const auto reduce_warp = [&] {
    for (int lanes = 16; lanes > 0; lanes /= 2) {
      RowPart other;
      other.score = __shfl_xor_sync(kAllLanes, part.score, lanes);
      other.max = __shfl_xor_sync(kAllLanes, part.max, lanes);
      other.id = __shfl_xor_sync(kAllLanes, part.id, lanes);
      other.bad = __shfl_xor_sync(kAllLanes, part.bad, lanes);
      Merge(part, other);
    }
  };
  reduce_warp();
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = part;
  __syncthreads();
  part = warps[threadIdx.x % kWarps];
  reduce_warp();
  return part;
}

__device__ __forceinline__ RowPart NoPart() {
  RowPart part;
  part.score = -INFINITY;
  part.max = MinusInfinity();
  return part;
}

__device__ RowPart ScanPart(const SamplingStep& step, const DeviceRow& row, int part_index) {
  const RowVectors vectors(step.logits + row.logits_row * step.stride,
                           static_cast<int32_t>(step.vocab.end - step.vocab.begin));
  const int32_t parts = static_cast<int32_t>(step.num_parts);
  const int32_t per_part = (vectors.count() + parts - 1) / parts;
  const int32_t begin = part_index * per_part;
  const int32_t end = min(begin + per_part, vectors.count());
  RowPart best = NoPart();
  double bar = -INFINITY;
  for (int32_t base = begin; base < end; base += kUnroll * kThreads) {
    float x[kLogitsAtOnce];
    int32_t ids[kLogitsAtOnce];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int32_t v = base + u * kThreads + static_cast<int32_t>(threadIdx.x);
      vectors.Load(v, end, x + 4 * u);
      for (int i = 0; i < 4; ++i) {
        ids[4 * u + i] = static_cast<int32_t>(step.vocab.begin) + vectors.FirstColumn(v) + i;
      }
    }
#pragma unroll
    for (int i = 0; i < kLogitsAtOnce; ++i) best.bad |= !(x[i] <= FLT_MAX);
    if (row.kind == DeviceRowKind::kGreedy) {
      ScanGreedy(x, ids, best);
    } else {
      ScanRace(row, x, ids, best, bar);
    }
  }
  if (row.kind == DeviceRowKind::kGreedy) best.score = best.max;
  return best;
}

// Block b takes part b % num_parts of row b / num_parts; the last block of a row to end merges the
// parts.
__global__ void __launch_bounds__(kThreads) ScanRowsKernel(SamplingStep step) {
  __shared__ RowPart warps[kWarps];
  __shared__ bool is_last;
  const int64_t row_index = blockIdx.x / step.num_parts;
  const int part_index = static_cast<int>(blockIdx.x % step.num_parts);
  const DeviceRow row = step.rows[row_index];
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    reinterpret_cast<MessageHeader*>(step.message)->digest = step.digest;
  }
  RowPart part = ReduceBlock(ScanPart(step, row, part_index), warps);
  RowPart* const parts = step.parts + row_index * step.num_parts;
  if (threadIdx.x == 0) {
    parts[part_index] = part;
    __threadfence();
    is_last = atomicAdd(&step.arrivals[row_index], 1) == step.num_parts - 1;
  }
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  part = NoPart();
  for (int64_t p = threadIdx.x; p < step.num_parts; p += kThreads) {
    const RowPart* const other = parts + p;
    RowPart read;
    read.score = __ldcg(&other->score);
    read.max = __ldcg(&other->max);
    read.id = __ldcg(&other->id);
    read.bad = __ldcg(&other->bad);
    Merge(part, read);
  }
  part = ReduceBlock(part, warps);
  if (threadIdx.x != 0) return;
  step.arrivals[row_index] = 0;
  Candidate& candidate =
      reinterpret_cast<Candidate*>(step.message + sizeof(MessageHeader))[row_index];
  candidate.score = part.score;
  candidate.logit = part.bad != 0 ? MinusInfinity() : part.max;
  candidate.raw = 0;
  candidate.id = part.bad != 0 ? kBadRow : part.id;
}

// One warp a row: a rank a lane.
__global__ void __launch_bounds__(kThreads) PickTokensKernel(SamplingResults results) {
  const int64_t thread = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t row_index = thread / 32;
  const int lane = threadIdx.x % 32;
  if (row_index >= results.num_rows) return;
  RowPart best = NoPart();
  for (int64_t rank = lane; rank < results.num_ranks; rank += 32) {
    const std::byte* const message = results.messages + rank * results.message_bytes;
    const Candidate& candidate =
        reinterpret_cast<const Candidate*>(message + sizeof(MessageHeader))[row_index];
    if (candidate.id == kBadRow) {
      best.bad = 1;
    } else if (candidate.id >= 0) {
      Offer(best, candidate.score, candidate.id);
    }
    if (row_index == 0) {
      results.digests[rank] = reinterpret_cast<const MessageHeader*>(message)->digest;
    }
  }
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    const double score = __shfl_xor_sync(kAllLanes, best.score, lanes);
    const int32_t id = __shfl_xor_sync(kAllLanes, best.id, lanes);
    best.bad |= __shfl_xor_sync(kAllLanes, best.bad, lanes);
    Offer(best, score, id);
  }
  if (lane != 0) return;
  const int32_t token = best.bad != 0 || best.id < 0 ? kFailedToken : best.id;
  results.tokens[row_index] = token;
  results.last_tokens[results.rows[row_index].slot] = max(token, 0);
}

__global__ void StoreTokensKernel(const int32_t* slots, const int32_t* tokens, int64_t count,
                                  int32_t* last_tokens) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < count) last_tokens[slots[i]] = max(tokens[i], 0);
}

unsigned NumBlocks(int64_t threads) {
  return static_cast<unsigned>((threads + kThreads - 1) / kThreads);
}

}  // namespace

int64_t NumParts(int64_t num_rows, int64_t local_vocab, int num_multiprocessors) {
  // Two rounds of the loop of a block, at least; eight blocks run on a multiprocessor at once.
  const int64_t most = std::max<int64_t>(1, local_vocab / (kThreads * kLogitsAtOnce));
  const int64_t wanted = (int64_t{8} * num_multiprocessors + num_rows - 1) / num_rows;
  return std::clamp<int64_t>(wanted, 1, most);
}

absl::Status ScanRows(const SamplingStep& step, CudaStream stream) {
  const int64_t blocks = step.num_rows * step.num_parts;
  LOCKSTEP_CHECK(blocks > 0 && blocks <= 0x7fffffff);
  ScanRowsKernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(step);
  LOCKSTEP_CUDA_LAUNCHED("ScanRows");
  return absl::OkStatus();
}

absl::Status PickTokens(const SamplingResults& results, CudaStream stream) {
  PickTokensKernel<<<NumBlocks(results.num_rows * 32), kThreads, 0, stream>>>(results);
  LOCKSTEP_CUDA_LAUNCHED("PickTokens");
  return absl::OkStatus();
}

absl::Status StoreTokens(const int32_t* slots, const int32_t* tokens, int64_t count,
                         int32_t* last_tokens, CudaStream stream) {
  if (count == 0) return absl::OkStatus();
  StoreTokensKernel<<<NumBlocks(count), kThreads, 0, stream>>>(slots, tokens, count, last_tokens);
  LOCKSTEP_CUDA_LAUNCHED("StoreTokens");
  return absl::OkStatus();
}

}  // namespace lockstep
