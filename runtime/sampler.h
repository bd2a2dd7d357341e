// Picks the next token of each row from logits whose columns are spread over the ranks.
//
// The request's adjustments come first (LogitAdjuster). Temperature 0: the largest logit, lowest id
// on ties, whatever min_p, top_k and top_p say. Otherwise the logits are divided by the
// temperature, cut to those of at least min_p times the largest probability, then to the top_k
// largest (ties at the border: lowest ids), softmax is renormalised over those, cut to the smallest
// set of most probable ids whose mass reaches top_p, and one id is drawn by the Gumbel-max trick
// (Gumbel 1954; Maddison, Tarlow, Minka, "A* Sampling", 2014): argmax over ids of logit /
// temperature + Gumbel noise. The noise of an id is a pure function of (seed, position, id), so
// equal logits give equal ids at every N, in every batch and after any history.
//
// A step's rows share their exchanges, so their number does not grow with the rows. The first
// carries {score, id} of greedy rows and of those with a temperature alone, the best candidates of
// rows with a small top_k, a histogram of the softmax mass of other filtered rows, and what log
// probabilities need. Only those other rows need more: one exchange of some ids where few are near
// the border, and before it up to four for each of top_k and top_p where many are (row_filter.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "parallel/communicator.h"
#include "runtime/core/buffer.h"
#include "runtime/core/range.h"
#include "runtime/core/thread_pool.h"
#include "runtime/gumbel_race.h"
#include "runtime/logit_adjuster.h"
#include "runtime/logit_scan.h"
#include "runtime/logprobs.h"
#include "runtime/request.h"
#include "runtime/row_filter.h"

namespace lockstep {

// Stands for the token of a row whose logits hold NaN or +infinity, or -infinity alone.
inline constexpr int32_t kFailedToken = -1;

inline constexpr double kMinTemperature = 1e-6;

// Rows with at most this top_k send so many candidates at once: less than a histogram.
inline constexpr int64_t kMaxCandidates = 160;

struct SampleRow {
  int32_t logits_row = 0;
  int32_t position = 0;  // of the token to be picked
  uint64_t seed = 0;
  double temperature = 0;
  double top_p = 1;
  double min_p = 0;
  int64_t top_k = 0;                        // 0: off
  const LogitAdjuster* adjuster = nullptr;  // null: none
  int32_t num_logprobs = -1;                // -1: none are wanted

  // Below kMinTemperature the noise is smaller than the spacing of float32 logits.
  bool greedy() const { return temperature < kMinTemperature; }
  bool filtered() const { return !greedy() && (top_k > 0 || top_p < 1 || min_p > 0); }
};

// The same on all ranks.
struct SampleOutput {
  std::vector<int32_t> tokens;  // [rows] ids, or kFailedToken
  // [rows], empty when no row wants any; rows that want none have no top. A failed row: NaN and no
  // top.
  std::vector<PositionLogprobs> logprobs;
  std::vector<uint64_t> digests;  // [N] what each rank passed, empty when there is no row
};

class Sampler {
 public:
  // `vocab_ranges` are all ranks' columns, in rank order; they partition [0, V). The references
  // must outlive the sampler.
  Sampler(std::vector<Range> vocab_ranges, Communicator& communicator, ThreadPool& threads);

  // COLLECTIVE, with the same rows on all ranks. `logits` is float32 [R, V_local]; columns from
  // V_local on are padding and never read. Rows with an adjuster are changed in place. `digest`
  // travels with the first exchange, so comparing ranks costs no collective of its own. Log
  // probabilities are those of the logits as they came in.
  absl::Status Sample(const MatrixView& logits, std::span<const SampleRow> rows, uint64_t digest,
                      SampleOutput& output);

 private:
  // How a row comes to its token.
  enum class Kind { kGreedy, kDraw, kCandidates, kFilter };
  struct RowState {
    Kind kind = Kind::kGreedy;
    FilterLimits limits;
    int64_t summary_offset = 0;  // of the row's parts in a rank's first message
    int64_t filter_offset = 0;
    std::vector<float> raw;  // what the adjuster changed
  };
  struct FilteredRow {
    size_t row = 0;
    RowFilter filter;
    std::vector<int64_t> offsets;  // [N] of the row in each rank's message
  };

  // Calls fn(i) for [0, count), spread over the threads.
  template <typename Fn>
  void ForEach(size_t count, const Fn& fn);
  Kind KindOf(const SampleRow& row, FilterLimits& limits) const;
  int64_t PlanFirstMessage(std::span<const SampleRow> rows);
  // On this rank's columns: adjusts the row and writes its part of the first message.
  void WriteFirst(const MatrixView& logits, const SampleRow& row, size_t i);
  Candidate FindBest(const SampleRow& row, size_t i, const LogitSlice& slice, float max) const;
  void WriteCandidates(const SampleRow& row, size_t i, const LogitSlice& slice,
                       std::byte* out) const;
  Candidate MakeCandidate(const SampleRow& row, size_t i, const LogitSlice& slice,
                          const LogitAndId& entry) const;
  Candidate RunRace(const SampleRow& row, size_t i, const LogitSlice& slice,
                    const Survivors& survivors) const;
  float RawLogit(const SampleRow& row, size_t i, const LogitSlice& slice, int32_t id) const;
  LogitSlice SliceOf(const MatrixView& logits, const SampleRow& row, size_t i) const;

  void ReadFirst(size_t i);
  Candidate PickFromCandidates(size_t i, float max) const;
  void StartFilters();
  void StartFilter(FilteredRow& filtered) const;
  absl::Status RunFilters(const MatrixView& logits, std::span<const SampleRow> rows);
  absl::Status FilterRound(const MatrixView& logits, std::span<const SampleRow> rows);
  void WriteFilterMessage(const MatrixView& logits, const SampleRow& row,
                          const FilteredRow& filtered);
  void ReadFilterMessages(FilteredRow& filtered) const;
  void WriteOutput(std::span<const SampleRow> rows, SampleOutput& output);

  const Candidate& FirstBest(size_t rank, size_t i) const;
  const std::byte* FirstMessage(size_t rank) const {
    return first_receive_.data() + static_cast<int64_t>(rank) * first_bytes_;
  }
  size_t num_ranks() const { return vocab_ranges_.size(); }

  const std::vector<Range> vocab_ranges_;
  const Range vocab_;  // this rank's
  Communicator& communicator_;
  ThreadPool& threads_;

  // Kept between steps, so that steady decoding allocates nothing.
  std::vector<RowState> states_;      // [rows]
  std::vector<Candidate> winners_;    // [rows], id -1: failed
  std::vector<float> block_max_;      // [rows, NumScanBlocks(V_local)]
  std::vector<FilteredRow> filters_;  // the first num_filters_ are in use
  size_t num_filters_ = 0;
  int64_t first_bytes_ = 0;
  std::vector<std::byte> send_;
  std::vector<std::byte> first_receive_;  // [N, first_bytes_]
  std::vector<std::byte> receive_;
  std::vector<int64_t> rank_bytes_;  // [N] of a round of the filters
  std::vector<int64_t> rank_begin_;  // [N] of each rank in receive_
};

}  // namespace lockstep
