// min_p, top_k and top_p over the whole vocabulary, on devices: what row_filter.h does, in a fixed
// number of rounds, so that the host need not know how a row fares.
//
// Each row has a state, which all ranks change alike. First min_p's floor, from the largest logit.
// Then a histogram of the softmax mass says in which bucket the border of top_k (or of top_p) lies,
// and kCutRounds histograms over ever narrower ranges of keys end at a single logit, whose ids are
// taken lowest first; the same for top_p when both are asked for. Between two rounds the ranks'
// histograms are exchanged. Last, the race of those that are left.
#pragma once

#include <cstdint>

#include "runtime/cuda_sampling.h"

namespace lockstep {

inline constexpr int kFilterCellBits = 9;
inline constexpr int kFilterCells = 1 << kFilterCellBits;
static_assert(kFilterCells > kMassBuckets);
// 9 of the 32 bits of a key in each.
inline constexpr int kCutRounds = 4;
// Rows that are filtered together.
inline constexpr int64_t kMaxFilterRows = 256;

// Of a row on a rank: by bucket, or by cell of the range in question.
struct FilterHistogram {
  uint64_t mantissas[kFilterCells];
  uint32_t count[kFilterCells];
};

enum class FilterStage : int32_t { kHistogram, kTopK, kTopP, kRace, kDone };

// As RowFilter's members of the same names.
struct FilterState {
  Mass above_mass;
  uint64_t above_count;
  uint64_t in_bucket_count;
  uint64_t in_bucket_mantissas;
  double top;  // MassStep of the largest logit
  double wanted_mass;
  float max;
  FilterStage stage;
  uint32_t floor;   // keys from here on are left, of those that are equal the columns
  int32_t tie_end;  // before this one
  int32_t bucket;
  uint32_t low;
  uint32_t high;
  int32_t shift;
  uint64_t bucket_count[kMassBuckets + 1];
  uint64_t bucket_mantissas[kMassBuckets + 1];
};

struct FilterStep {
  SamplingStep step;
  SamplingResults results;
  int64_t rank = 0;
  const int32_t* rows = nullptr;  // [num_rows] of step.rows
  int64_t num_rows = 0;
  int64_t num_parts = 0;                  // blocks a row
  FilterState* states = nullptr;          // [num_rows]
  FilterHistogram* histograms = nullptr;  // [N, num_rows], those of the ranks
  Candidate* candidates = nullptr;        // [N, num_rows]
};

// From the first messages of all ranks.
absl::Status StartFilters(const FilterStep& filter, CudaStream stream);
// This rank's histograms of the round.
absl::Status CountFilters(const FilterStep& filter, CudaStream stream);
// What follows from those of all ranks.
absl::Status NarrowFilters(const FilterStep& filter, CudaStream stream);
// This rank's best candidates.
absl::Status RaceFilters(const FilterStep& filter, CudaStream stream);
// The winners of all ranks.
absl::Status PickFiltered(const FilterStep& filter, CudaStream stream);

}  // namespace lockstep
