// Rows that need one pass over their logits, adjustments, and the choice between the ranks' best.
#include <algorithm>

#include "runtime/core/cuda_errors.h"
#include "runtime/cuda_sampling_device.cuh"
#include "runtime/sampler.h"

namespace lockstep {

namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
// Vectors of four logits that a thread loads at once.
constexpr int kUnroll = 2;
constexpr int kLogitsAtOnce = 4 * kUnroll;

template <bool kRace>
__device__ RowPart ScanPart(const SamplingStep& step, const DeviceRow& row, int part_index) {
  const RowVectors vectors = VectorsOf(step, row);
  const VectorRange range = PartOf(vectors, part_index, static_cast<int32_t>(step.num_parts));
  RowPart best = NoPart();
  double bar = -INFINITY;
  for (int32_t base = range.begin; base < range.end; base += kUnroll * kThreads) {
    float x[kLogitsAtOnce];
    int32_t ids[kLogitsAtOnce];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int32_t v = base + u * kThreads + static_cast<int32_t>(threadIdx.x);
      vectors.Load(v, range.end, x + 4 * u);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        ids[4 * u + i] = static_cast<int32_t>(step.vocab.begin) + vectors.FirstColumn(v) + i;
      }
    }
#pragma unroll
    for (int i = 0; i < kLogitsAtOnce; ++i) {
      best.bad |= !(x[i] <= FLT_MAX);
      // Ids rise, so the first of equal logits has the lowest.
      if (x[i] > best.max) {
        best.max = x[i];
        if (!kRace) best.id = ids[i];
      }
    }
    if (kRace) RunRace<kLogitsAtOnce>(row, x, ids, best, bar);
  }
  if (!kRace) best.score = best.max;
  return best;
}

// Block b takes part b % num_parts of row b / num_parts; the last block of a row merges the parts.
template <bool kRace>
__global__ void __launch_bounds__(kThreads) ScanRowsKernel(SamplingStep step) {
  __shared__ RowPart warps[kWarps];
  __shared__ bool is_last;
  __shared__ float found;
  WriteHeader(step);
  const int64_t row_index = blockIdx.x / step.num_parts;
  const int part_index = static_cast<int>(blockIdx.x % step.num_parts);
  const DeviceRow row = step.rows[row_index];
  if (row.kind == DeviceRowKind::kCandidates || (row.kind == DeviceRowKind::kDraw) != kRace) return;
  RowPart part = ReduceBlock<kWarps>(ScanPart<kRace>(step, row, part_index), warps);
  RowPart* const parts = step.parts + row_index * step.num_parts;
  if (threadIdx.x == 0) parts[part_index] = part;
  if (!ArrivesLast(&step.arrivals[row_index], step.num_parts, &is_last)) return;
  part = NoPart();
  for (int64_t p = threadIdx.x; p < step.num_parts; p += kThreads) Merge(part, ReadPart(parts + p));
  part = ReduceBlock<kWarps>(part, warps);
  float raw = 0;
  if (row.num_logprobs >= 0 && part.bad == 0 && part.id >= 0) {
    const int32_t column = part.id - static_cast<int32_t>(step.vocab.begin);
    const float logit = step.logits[row.logits_row * step.stride + column];
    raw = BlockRawLogit(step, row, column, logit, &found);
  }
  if (threadIdx.x != 0) return;
  Candidate& candidate =
      reinterpret_cast<Candidate*>(step.message + sizeof(MessageHeader))[row_index];
  candidate.score = part.score;
  candidate.logit = part.bad != 0 ? MinusInfinity() : part.max;
  candidate.raw = raw;
  candidate.id = part.bad != 0 ? kBadRow : part.id;
}

__global__ void AdjustLogitsKernel(SamplingStep step) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= step.num_adjustments) return;
  DeviceAdjustment& adjustment = step.adjustments[i];
  const DeviceRow& row = step.rows[adjustment.row];
  float& logit = step.logits[row.logits_row * step.stride + adjustment.column];
  const float raw = logit;
  adjustment.raw = raw;
  logit = adjustment.banned != 0 && raw <= FLT_MAX
              ? MinusInfinity()
              : AdjustedLogit(raw, adjustment.bias, adjustment.in_prompt != 0, adjustment.generated,
                              row.penalties);
}

// One warp a row: a rank a lane.
__global__ void __launch_bounds__(kThreads) PickTokensKernel(SamplingResults results) {
  const int64_t row_index = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / 32;
  const int lane = threadIdx.x % 32;
  if (row_index >= results.num_rows) return;
  if (row_index == 0) {
    for (int64_t rank = lane; rank < results.num_ranks; rank += 32) {
      results.digests[rank] = HeaderOf(results, rank).digest;
    }
  }
  const DeviceRowKind kind = results.rows[row_index].kind;
  if (kind == DeviceRowKind::kCandidates || kind == DeviceRowKind::kFilter) return;
  RowPart best = NoPart();
  for (int64_t rank = lane; rank < results.num_ranks; rank += 32) {
    const Candidate& candidate = BestOf(results, rank, row_index);
    if (candidate.id == kBadRow) best.bad = 1;
    if (candidate.id >= 0 && BeatsScore(candidate.score, candidate.id, best.score, best.id)) {
      best.score = candidate.score, best.id = candidate.id, best.max = candidate.raw;
    }
  }
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    const double score = __shfl_xor_sync(kAllLanes, best.score, lanes);
    const float raw = __shfl_xor_sync(kAllLanes, best.max, lanes);
    const int32_t id = __shfl_xor_sync(kAllLanes, best.id, lanes);
    best.bad |= __shfl_xor_sync(kAllLanes, best.bad, lanes);
    if (BeatsScore(score, id, best.score, best.id)) {
      best.score = score, best.id = id, best.max = raw;
    }
  }
  if (lane != 0) return;
  const bool failed = best.bad != 0 || best.id < 0;
  WriteToken(results, row_index, failed ? kFailedToken : best.id, failed ? 0.0f : best.max);
}

// How many candidates of a rank, which lie best first, go before `rank_key`.
__device__ int NumBetter(const Candidate* candidates, int count, uint64_t rank_key) {
  int low = 0;
  int high = count;
  while (low < high) {
    const int middle = (low + high) / 2;
    const Candidate& candidate = candidates[middle];
    if (candidate.id >= 0 && RankOf(candidate.logit, candidate.id) > rank_key) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// Of `count` candidates, best logit first: the one that wins the race among those that min_p and
// top_p keep; -1: there is none. As Sampler::PickFromCandidates.
__device__ int PickWinner(const DeviceRow& row, const float* logits, const double* scores,
                          const int32_t* ids, const Mass* masses, int count, float max) {
  int kept = count;
  if (row.min_p > 0) {
    const uint32_t floor = MinPKeyOf(max, row.scale, row.min_p);
    for (kept = 0; kept < count && KeyOf(logits[kept]) >= floor;) ++kept;
  }
  Mass total = 0;
  for (int i = 0; i < kept; ++i) total += masses[i];
  const double wanted = row.top_p * ToDouble(total);
  int winner = -1;
  Mass mass = 0;
  for (int i = 0; i < kept; ++i) {
    if (winner >= 0 && row.top_p < 1 && ToDouble(mass) >= wanted) break;
    mass += masses[i];
    if (winner < 0 || BeatsScore(scores[i], ids[i], scores[winner], ids[winner])) winner = i;
  }
  return winner;
}

// One block a row: merges the ranks' best few.
__global__ void __launch_bounds__(kThreads) PickCandidatesKernel(SamplingResults results) {
  __shared__ float logits[kMaxSelected];
  __shared__ float raws[kMaxSelected];
  __shared__ double scores[kMaxSelected];
  __shared__ int32_t ids[kMaxSelected];
  __shared__ Mass masses[kMaxSelected];
  __shared__ int count;
  const int64_t row_index = blockIdx.x;
  const DeviceRow row = results.rows[row_index];
  if (row.kind != DeviceRowKind::kCandidates) return;
  float max = MinusInfinity();
  bool bad = false;
  for (int64_t rank = 0; rank < results.num_ranks; ++rank) {
    const Candidate& best = BestOf(results, rank, row_index);
    max = fmaxf(max, best.logit);
    bad |= best.id == kBadRow;
  }
  if (threadIdx.x == 0) count = 0;
  __syncthreads();
  const double top = StepOf(max, row.scale);
  const int64_t num_candidates = bad ? 0 : results.num_ranks * row.top_k;
  for (int64_t i = threadIdx.x; i < num_candidates; i += kThreads) {
    const int64_t rank = i / row.top_k;
    const Candidate candidate = CandidatesOf(results, rank, row)[i % row.top_k];
    if (candidate.id < 0) continue;
    const uint64_t key = RankOf(candidate.logit, candidate.id);
    auto place = static_cast<int>(i % row.top_k);
    for (int64_t other = 0; other < results.num_ranks && place < row.top_k; ++other) {
      if (other != rank) place += NumBetter(CandidatesOf(results, other, row), row.top_k, key);
    }
    if (place >= row.top_k) continue;
    logits[place] = candidate.logit;
    raws[place] = candidate.raw;
    scores[place] = candidate.score;
    ids[place] = candidate.id;
    masses[place] = UnitOf(BucketOf(candidate.logit, row.scale, top), top) *
                    MantissaOf(candidate.logit, row.scale);
    atomicAdd(&count, 1);
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  const int winner = PickWinner(row, logits, scores, ids, masses, count, max);
  WriteToken(results, row_index, winner < 0 ? kFailedToken : ids[winner],
             winner < 0 ? 0.0f : raws[winner]);
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

MessageLayout LayoutOf(int64_t num_rows, const MessageTotals& totals) {
  const auto bytes = [](int64_t count, size_t size) { return count * static_cast<int64_t>(size); };
  MessageLayout layout;
  layout.sums = bytes(1, sizeof(MessageHeader)) + bytes(num_rows, sizeof(Candidate));
  layout.tops = layout.sums + bytes(totals.sums, sizeof(LogitSum));
  layout.candidates = layout.tops + bytes(totals.tops, sizeof(LogitAndId));
  layout.bytes = layout.candidates + bytes(totals.candidates, sizeof(Candidate));
  layout.bytes = (layout.bytes + 15) / 16 * 16;
  return layout;
}

int64_t NumParts(int64_t num_rows, int64_t local_vocab, int num_multiprocessors) {
  // At least one round of a block's loop; up to eight blocks run on a multiprocessor at once.
  const int64_t most = std::max<int64_t>(1, local_vocab / (kThreads * kLogitsAtOnce));
  const int64_t wanted = (int64_t{8} * num_multiprocessors + num_rows - 1) / num_rows;
  return std::clamp<int64_t>(wanted, 1, most);
}

absl::Status AdjustLogits(const SamplingStep& step, CudaStream stream) {
  AdjustLogitsKernel<<<NumBlocks(step.num_adjustments), kThreads, 0, stream>>>(step);
  LOCKSTEP_CUDA_LAUNCHED("AdjustLogits");
  return absl::OkStatus();
}

absl::Status ScanRows(const SamplingStep& step, bool race, CudaStream stream) {
  const int64_t blocks = step.num_rows * step.num_parts;
  LOCKSTEP_CHECK(blocks > 0 && blocks <= 0x7fffffff);
  const auto grid = static_cast<unsigned>(blocks);
  if (race) {
    ScanRowsKernel<true><<<grid, kThreads, 0, stream>>>(step);
  } else {
    ScanRowsKernel<false><<<grid, kThreads, 0, stream>>>(step);
  }
  LOCKSTEP_CUDA_LAUNCHED("ScanRows");
  return absl::OkStatus();
}

absl::Status PickTokens(const SamplingResults& results, CudaStream stream) {
  PickTokensKernel<<<NumBlocks(results.num_rows * 32), kThreads, 0, stream>>>(results);
  LOCKSTEP_CUDA_LAUNCHED("PickTokens");
  if (!results.has_candidates) return absl::OkStatus();
  const auto rows = static_cast<unsigned>(results.num_rows);
  PickCandidatesKernel<<<rows, kThreads, 0, stream>>>(results);
  LOCKSTEP_CUDA_LAUNCHED("PickCandidates");
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
