#include "runtime/core/cuda_errors.h"
#include "runtime/cuda_filter.h"
#include "runtime/cuda_sampling_device.cuh"
#include "runtime/sampler.h"

namespace lockstep {

namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kLogitsAtOnce = 4;
constexpr int32_t kAllColumns = 0x7fffffff;

__device__ __forceinline__ Mass ShuffleMass(Mass mass, int from) {
  const auto high = static_cast<unsigned long long>(
      __shfl_sync(kAllLanes, static_cast<uint64_t>(mass >> 64), from));
  const auto low =
      static_cast<unsigned long long>(__shfl_sync(kAllLanes, static_cast<uint64_t>(mass), from));
  return Mass{high} << 64 | low;
}

__device__ __forceinline__ bool IsLeft(uint32_t key, int32_t column, uint32_t floor,
                                       int32_t tie_end) {
  return key > floor || (key == floor && column < tie_end);
}

__device__ __forceinline__ FilterHistogram& HistogramOf(const FilterStep& filter, int64_t rank,
                                                        int64_t i) {
  return filter.histograms[rank * filter.num_rows + i];
}
// All threads of a block.
__device__ void Clear(FilterHistogram& histogram) {
  for (int cell = threadIdx.x; cell < kFilterCells; cell += kThreads) {
    histogram.mantissas[cell] = 0;
    histogram.count[cell] = 0;
  }
}

// One block a row.
__global__ void __launch_bounds__(kThreads) StartFiltersKernel(FilterStep filter) {
  const int64_t i = blockIdx.x;
  Clear(HistogramOf(filter, filter.rank, i));
  if (threadIdx.x != 0) return;
  const int32_t row_index = filter.rows[i];
  const DeviceRow& row = filter.step.rows[row_index];
  float max = MinusInfinity();
  bool bad = false;
  for (int64_t rank = 0; rank < filter.results.num_ranks; ++rank) {
    const Candidate& best = BestOf(filter.results, rank, row_index);
    max = fmaxf(max, best.logit);
    bad |= best.id == kBadRow;
  }
  FilterState& state = filter.states[i];
  state.max = max;
  state.top = StepOf(max, row.scale);
  state.floor = kLowestKey;
  state.tie_end = kAllColumns;
  if (bad || max == MinusInfinity()) {
    state.stage = FilterStage::kDone;
    WriteToken(filter.results, row_index, kFailedToken, 0);
    return;
  }
  if (row.min_p > 0) state.floor = MinPKeyOf(max, row.scale, row.min_p);
  state.stage = row.top_k > 0 || row.top_p < 1 ? FilterStage::kHistogram : FilterStage::kRace;
}

// Block b takes part b % num_parts of row b / num_parts.
__global__ void __launch_bounds__(kThreads) CountFiltersKernel(FilterStep filter) {
  // Sums of mantissas in two words: of 32 bits each there is an atomic sum in one instruction.
  __shared__ uint32_t low_words[kFilterCells];
  __shared__ uint32_t high_words[kFilterCells];
  __shared__ uint32_t counts[kFilterCells];
  const int64_t i = blockIdx.x / filter.num_parts;
  const FilterState& state = filter.states[i];
  const FilterStage stage = state.stage;
  if (stage == FilterStage::kRace || stage == FilterStage::kDone) return;
  for (int cell = threadIdx.x; cell < kFilterCells; cell += kThreads) {
    low_words[cell] = high_words[cell] = counts[cell] = 0;
  }
  __syncthreads();
  const DeviceRow& row = filter.step.rows[filter.rows[i]];
  const RowVectors vectors = VectorsOf(filter.step, row);
  const VectorRange range = PartOf(vectors, static_cast<int32_t>(blockIdx.x % filter.num_parts),
                                   static_cast<int32_t>(filter.num_parts));
  const bool by_bucket = stage == FilterStage::kHistogram;
  const double scale = row.scale;
  const double top = state.top;
  const uint32_t floor = state.floor;
  const int32_t tie_end = state.tie_end;
  const uint32_t low = by_bucket ? 0 : state.low;
  const uint32_t high = by_bucket ? ~0u : state.high;
  const int shift = state.shift;
  // Ids of the last bucket have no mass.
  const bool massless = !by_bucket && state.bucket == kMassBuckets;
  for (int32_t v = range.begin + static_cast<int32_t>(threadIdx.x); v < range.end; v += kThreads) {
    float x[kLogitsAtOnce];
    vectors.Load(v, range.end, x);
#pragma unroll
    for (int j = 0; j < kLogitsAtOnce; ++j) {
      const int32_t column = vectors.FirstColumn(v) + j;
      const uint32_t key = KeyOf(x[j]);
      if (!vectors.Holds(column) || key < low || key > high ||
          !IsLeft(key, column, floor, tie_end)) {
        continue;
      }
      const int cell =
          by_bucket ? BucketOf(x[j], scale, top) : static_cast<int>((key - low) >> shift);
      atomicAdd(&counts[cell], 1u);
      if (massless || (by_bucket && cell == kMassBuckets)) continue;
      const auto mantissa = static_cast<uint32_t>(MantissaOf(x[j], scale));
      const uint32_t before = atomicAdd(&low_words[cell], mantissa);
      if (before + mantissa < before) atomicAdd(&high_words[cell], 1u);
    }
  }
  __syncthreads();
  FilterHistogram& histogram = HistogramOf(filter, filter.rank, i);
  for (int cell = threadIdx.x; cell < kFilterCells; cell += kThreads) {
    if (counts[cell] == 0) continue;
    atomicAdd(&histogram.count[cell], counts[cell]);
    atomicAdd(reinterpret_cast<unsigned long long*>(&histogram.mantissas[cell]),
              static_cast<unsigned long long>(high_words[cell]) << 32 | low_words[cell]);
  }
}

// --- NarrowFilters: the first warp of a block decides, all its lanes alike ---

struct Filtered {
  const FilterStep& filter;
  const DeviceRow& row;
  FilterState& state;  // shared

  __device__ bool Reaches(uint64_t count, Mass mass) const {
    if (state.stage == FilterStage::kTopK) return count >= static_cast<uint64_t>(row.top_k);
    return ToDouble(mass) >= state.wanted_mass;
  }
};

struct Entry {
  uint64_t count;
  uint64_t mantissas;
  Mass mass;
};
__device__ __forceinline__ void Add(Entry& sum, const Entry& entry) {
  sum.count += entry.count;
  sum.mantissas += entry.mantissas;
  sum.mass += entry.mass;
}
__device__ __forceinline__ Entry ShuffleEntry(const Entry& entry, int from) {
  return {__shfl_sync(kAllLanes, entry.count, from), __shfl_sync(kAllLanes, entry.mantissas, from),
          ShuffleMass(entry.mass, from)};
}

// The first of `num` entries, which entry(i) gives, whose count and mass with all before it and
// `above` reach the border; `num` when none does. `above` becomes that and all before it.
template <typename EntryAt>
__device__ int FindBorder(const Filtered& filtered, int num, const EntryAt& entry, Entry& above) {
  const int lane = threadIdx.x % 32;
  const int each = (num + 31) / 32;
  const int begin = min(lane * each, num);
  const int end = min(begin + each, num);
  Entry mine{0, 0, 0};
  for (int i = begin; i < end; ++i) Add(mine, entry(i));
  // Sums over the lanes before this one.
  Entry up_to = mine;
  for (int lanes = 1; lanes < 32; lanes *= 2) {
    const Entry other = ShuffleEntry(up_to, max(lane - lanes, 0));
    if (lane >= lanes) Add(up_to, other);
  }
  Entry before = ShuffleEntry(up_to, max(lane - 1, 0));
  if (lane == 0) before = {0, 0, 0};
  Add(before, above);
  Add(up_to, above);
  const unsigned reaching = __ballot_sync(kAllLanes, filtered.Reaches(up_to.count, up_to.mass));
  if (reaching == 0) {
    above = ShuffleEntry(up_to, 31);
    return num;
  }
  const int first = __ffs(static_cast<int>(reaching)) - 1;
  above = ShuffleEntry(before, first);
  int at = min(first * each, num);
  for (const int last = min(at + each, num) - 1; at < last; ++at) {
    Entry with = above;
    Add(with, entry(at));
    if (filtered.Reaches(with.count, with.mass)) break;
    above = with;
  }
  return at;
}

__device__ __forceinline__ int ShiftOf(uint32_t low, uint32_t high) {
  const int width = 32 - __clz(static_cast<int>(high - low));
  return max(0, width - kFilterCellBits);
}

// As RowFilter::SetBucketRange.
__device__ void SetBucketRange(const Filtered& filtered) {
  FilterState& state = filtered.state;
  const int lane = threadIdx.x % 32;
  const int bucket = state.bucket - (lane == 1 ? 1 : 0);
  const uint32_t max_key = KeyOf(state.max);
  const uint32_t first = FirstKeyWhere(kLowestKey, max_key, [&](float logit) {
    return BucketOf(logit, filtered.row.scale, state.top) <= bucket;
  });
  const uint32_t first_here = __shfl_sync(kAllLanes, first, 0);
  const uint32_t first_above = __shfl_sync(kAllLanes, first, 1);
  const uint32_t low = max(first_here, state.floor);
  const uint32_t high = state.bucket == 0 ? max_key : first_above - 1;
  __syncwarp();
  state.low = low;
  state.high = high;
  state.shift = ShiftOf(low, high);
}

// As RowFilter::BeginCut, for state.stage.
__device__ void BeginCut(const Filtered& filtered) {
  FilterState& state = filtered.state;
  const auto entry = [&](int bucket) -> Entry {
    return {state.bucket_count[bucket], state.bucket_mantissas[bucket],
            UnitOf(bucket, state.top) * state.bucket_mantissas[bucket]};
  };
  const int lane = threadIdx.x % 32;
  Mass total = 0;
  for (int bucket = lane; bucket < kMassBuckets; bucket += 32) total += entry(bucket).mass;
  for (int lanes = 16; lanes > 0; lanes /= 2) total += ShuffleMass(total, lane ^ lanes);
  const double wanted = fmax(filtered.row.top_p * ToDouble(total), 1.0);  // at least one id
  __syncwarp();
  state.wanted_mass = wanted;
  __syncwarp();
  Entry above{0, 0, 0};
  const int bucket = FindBorder(filtered, kMassBuckets, entry, above);
  __syncwarp();
  state.bucket = bucket;
  state.above_count = above.count;
  state.above_mass = above.mass;
  state.in_bucket_count = state.in_bucket_mantissas = 0;
  __syncwarp();
  SetBucketRange(filtered);
}

// As RowFilter::NextStage, behind its min_p.
__device__ void NextStage(const Filtered& filtered) {
  FilterState& state = filtered.state;
  const FilterStage stage = state.stage;
  uint64_t total = 0;
  for (int bucket = threadIdx.x % 32; bucket <= kMassBuckets; bucket += 32) {
    total += state.bucket_count[bucket];
  }
  for (int lanes = 16; lanes > 0; lanes /= 2) total += __shfl_xor_sync(kAllLanes, total, lanes);
  FilterStage next = FilterStage::kRace;
  if (stage < FilterStage::kTopK && filtered.row.top_k > 0 &&
      total > static_cast<uint64_t>(filtered.row.top_k)) {
    next = FilterStage::kTopK;
  } else if (stage < FilterStage::kTopP && filtered.row.top_p < 1) {
    next = FilterStage::kTopP;
  }
  __syncwarp();
  state.stage = next;
  __syncwarp();
  if (next != FilterStage::kRace) BeginCut(filtered);
}

// As RowFilter::ResolveTies: all ids in question have the logit of state.low. Returns how many of
// this rank's ties, lowest ids first, have to be found; 0: state.tie_end says it.
__device__ int32_t ResolveTies(const Filtered& filtered, int64_t i, int cell, uint64_t available) {
  FilterState& state = filtered.state;
  const bool massless = state.bucket == kMassBuckets;
  const uint64_t mantissa = massless ? 0 : MantissaOf(FromKey(state.low), filtered.row.scale);
  const Mass unit = UnitOf(state.bucket, state.top);
  uint64_t taken = 1;
  for (uint64_t most = available; taken < most;) {
    const uint64_t middle = taken + (most - taken) / 2;
    if (filtered.Reaches(state.above_count + middle, state.above_mass + unit * mantissa * middle)) {
      most = middle;
    } else {
      taken = middle + 1;
    }
  }
  auto mine = static_cast<int64_t>(taken);
  for (int64_t rank = 0; rank < filtered.filter.rank; ++rank) {
    mine -= HistogramOf(filtered.filter, rank, i).count[cell];
  }
  const int64_t held = HistogramOf(filtered.filter, filtered.filter.rank, i).count[cell];
  const bool same_floor = state.floor == state.low;
  const uint64_t count = state.in_bucket_count + taken;
  const uint64_t mantissas = state.in_bucket_mantissas + mantissa * taken;
  const int32_t tie_end = mine <= 0 ? 0 : same_floor ? state.tie_end : kAllColumns;
  const uint32_t floor = state.low;
  const int bucket = state.bucket;
  __syncwarp();
  state.floor = floor;
  state.tie_end = tie_end;
  for (int b = bucket + static_cast<int>(threadIdx.x % 32); b <= kMassBuckets; b += 32) {
    state.bucket_count[b] = b == bucket ? count : 0;
    state.bucket_mantissas[b] = b == bucket && !massless ? mantissas : 0;
  }
  __syncwarp();
  return mine > 0 && mine < held ? static_cast<int32_t>(mine) : 0;
}

// As RowFilter::ReadCells. counts, mantissas: of all ranks.
__device__ int32_t NarrowCut(const Filtered& filtered, int64_t i, const uint64_t* counts,
                             const uint64_t* mantissas) {
  FilterState& state = filtered.state;
  const int top_cell = static_cast<int>((state.high - state.low) >> state.shift);
  const Mass unit = UnitOf(state.bucket, state.top);
  Entry above{state.above_count, state.in_bucket_mantissas, state.above_mass};
  const int passed = FindBorder(
      filtered, top_cell + 1,
      [&](int j) -> Entry {
        return {counts[top_cell - j], mantissas[top_cell - j], unit * mantissas[top_cell - j]};
      },
      above);
  // The cells hold what the bucket holds: the border is among them.
  const int cell = max(top_cell - passed, 0);
  const uint32_t low = state.low + (static_cast<uint32_t>(cell) << state.shift);
  const uint32_t high = min(state.high, low + ((1u << state.shift) - 1));
  const uint64_t in_bucket_count = state.in_bucket_count + (above.count - state.above_count);
  __syncwarp();
  state.low = low;
  state.high = high;
  state.shift = ShiftOf(low, high);
  state.above_count = above.count;
  state.above_mass = above.mass;
  state.in_bucket_count = in_bucket_count;
  state.in_bucket_mantissas = above.mantissas;
  __syncwarp();
  if (low < high) return 0;
  const int32_t ties = ResolveTies(filtered, i, cell, counts[cell]);
  NextStage(filtered);
  return ties;
}

// The column behind the `ties`-th of those with `key`. All threads of a block.
__device__ int32_t FindTieEnd(const RowVectors& vectors, uint32_t key, int32_t ties,
                              int32_t* found) {
  int32_t seen = 0;
  for (int32_t base = 0; base < vectors.size; base += kThreads) {
    const int32_t column = base + static_cast<int32_t>(threadIdx.x);
    const bool matches = column < vectors.size && KeyOf(vectors.logits[column]) == key;
    const int32_t here = __syncthreads_count(matches ? 1 : 0);
    if (seen + here < ties) {
      seen += here;
      continue;
    }
    if (threadIdx.x == 0) {
      for (*found = base; seen < ties; ++*found) {
        if (KeyOf(vectors.logits[*found]) == key) ++seen;
      }
    }
    __syncthreads();
    return *found;
  }
  return vectors.size;
}

// One block a row.
__global__ void __launch_bounds__(kThreads) NarrowFiltersKernel(FilterStep filter) {
  __shared__ uint64_t counts[kFilterCells];
  __shared__ uint64_t mantissas[kFilterCells];
  __shared__ FilterState state;
  __shared__ int32_t ties;
  __shared__ int32_t found;
  const int64_t i = blockIdx.x;
  const FilterStage stage = filter.states[i].stage;
  if (stage == FilterStage::kRace || stage == FilterStage::kDone) return;
  constexpr int kStateWords = static_cast<int>(sizeof(FilterState) / sizeof(uint32_t));
  auto* const words = reinterpret_cast<uint32_t*>(&state);
  auto* const stored = reinterpret_cast<uint32_t*>(&filter.states[i]);
  for (int w = threadIdx.x; w < kStateWords; w += kThreads) words[w] = stored[w];
  for (int cell = threadIdx.x; cell < kFilterCells; cell += kThreads) {
    uint64_t count = 0;
    uint64_t sum = 0;
    for (int64_t rank = 0; rank < filter.results.num_ranks; ++rank) {
      count += HistogramOf(filter, rank, i).count[cell];
      sum += HistogramOf(filter, rank, i).mantissas[cell];
    }
    counts[cell] = count;
    mantissas[cell] = sum;
  }
  __syncthreads();
  const DeviceRow& row = filter.step.rows[filter.rows[i]];
  if (stage == FilterStage::kHistogram) {
    for (int bucket = threadIdx.x; bucket <= kMassBuckets; bucket += kThreads) {
      state.bucket_count[bucket] = counts[bucket];
      state.bucket_mantissas[bucket] = mantissas[bucket];
    }
    __syncthreads();
  }
  if (threadIdx.x < 32) {
    const Filtered filtered{filter, row, state};
    int32_t to_find = 0;
    if (stage == FilterStage::kHistogram) {
      NextStage(filtered);
    } else {
      to_find = NarrowCut(filtered, i, counts, mantissas);
    }
    if (threadIdx.x == 0) ties = to_find;
  }
  __syncthreads();
  if (ties > 0) {
    const int32_t end = FindTieEnd(VectorsOf(filter.step, row), state.floor, ties, &found);
    if (threadIdx.x == 0) state.tie_end = end;
    __syncthreads();
  }
  for (int w = threadIdx.x; w < kStateWords; w += kThreads) stored[w] = words[w];
  Clear(HistogramOf(filter, filter.rank, i));
}

// As ScanRows' race, of what is left.
__global__ void __launch_bounds__(kThreads) RaceFiltersKernel(FilterStep filter) {
  __shared__ RowPart warps[kWarps];
  __shared__ bool is_last;
  __shared__ float column_raw;
  const SamplingStep& step = filter.step;
  const int64_t i = blockIdx.x / filter.num_parts;
  const int part_index = static_cast<int>(blockIdx.x % filter.num_parts);
  if (filter.states[i].stage == FilterStage::kDone) return;
  const uint32_t floor = filter.states[i].floor;
  const int32_t tie_end = filter.states[i].tie_end;
  const DeviceRow row = step.rows[filter.rows[i]];
  const RowVectors vectors = VectorsOf(step, row);
  const VectorRange range = PartOf(vectors, part_index, static_cast<int32_t>(filter.num_parts));
  RowPart best = NoPart();
  double bar = -INFINITY;
  for (int32_t base = range.begin; base < range.end; base += kThreads) {
    float x[kLogitsAtOnce];
    int32_t ids[kLogitsAtOnce];
    const int32_t v = base + static_cast<int32_t>(threadIdx.x);
    vectors.Load(v, range.end, x);
#pragma unroll
    for (int j = 0; j < kLogitsAtOnce; ++j) {
      const int32_t column = vectors.FirstColumn(v) + j;
      ids[j] = static_cast<int32_t>(step.vocab.begin) + column;
      if (!IsLeft(KeyOf(x[j]), column, floor, tie_end)) x[j] = MinusInfinity();
    }
    RunRace<kLogitsAtOnce>(row, x, ids, best, bar);
  }
  best = ReduceBlock<kWarps>(best, warps);
  RowPart* const parts = step.parts + i * filter.num_parts;
  if (threadIdx.x == 0) parts[part_index] = best;
  if (!ArrivesLast(&step.arrivals[i], filter.num_parts, &is_last)) return;
  best = NoPart();
  for (int64_t p = threadIdx.x; p < filter.num_parts; p += kThreads) {
    Merge(best, ReadPart(parts + p));
  }
  best = ReduceBlock<kWarps>(best, warps);
  float raw = 0;
  if (row.num_logprobs >= 0 && best.id >= 0) {
    const int32_t column = best.id - static_cast<int32_t>(step.vocab.begin);
    raw = BlockRawLogit(step, row, column, vectors.logits[column], &column_raw);
  }
  if (threadIdx.x != 0) return;
  Candidate& candidate = filter.candidates[filter.rank * filter.num_rows + i];
  candidate.score = best.score;
  candidate.logit = 0;
  candidate.raw = raw;
  candidate.id = best.id;
}

__global__ void __launch_bounds__(kThreads) PickFilteredKernel(FilterStep filter) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= filter.num_rows || filter.states[i].stage == FilterStage::kDone) return;
  int32_t id = -1;
  double score = -INFINITY;
  float raw = 0;
  for (int64_t rank = 0; rank < filter.results.num_ranks; ++rank) {
    const Candidate& candidate = filter.candidates[rank * filter.num_rows + i];
    if (candidate.id < 0 || !BeatsScore(candidate.score, candidate.id, score, id)) continue;
    id = candidate.id, score = candidate.score, raw = candidate.raw;
  }
  WriteToken(filter.results, filter.rows[i], id < 0 ? kFailedToken : id, raw);
}

absl::Status Run(const char* name, void (*kernel)(FilterStep), int64_t num_blocks,
                 const FilterStep& filter, CudaStream stream) {
  const auto blocks = static_cast<unsigned>(num_blocks);
  kernel<<<blocks, kThreads, 0, stream>>>(filter);
  return CudaStatus(cudaGetLastError(), name);
}

}  // namespace

absl::Status StartFilters(const FilterStep& filter, CudaStream stream) {
  return Run("StartFilters", StartFiltersKernel, filter.num_rows, filter, stream);
}
absl::Status CountFilters(const FilterStep& filter, CudaStream stream) {
  return Run("CountFilters", CountFiltersKernel, filter.num_rows * filter.num_parts, filter,
             stream);
}
absl::Status NarrowFilters(const FilterStep& filter, CudaStream stream) {
  return Run("NarrowFilters", NarrowFiltersKernel, filter.num_rows, filter, stream);
}
absl::Status RaceFilters(const FilterStep& filter, CudaStream stream) {
  return Run("RaceFilters", RaceFiltersKernel, filter.num_rows * filter.num_parts, filter, stream);
}
absl::Status PickFiltered(const FilterStep& filter, CudaStream stream) {
  return Run("PickFiltered", PickFilteredKernel, (filter.num_rows + kThreads - 1) / kThreads,
             filter, stream);
}

}  // namespace lockstep
