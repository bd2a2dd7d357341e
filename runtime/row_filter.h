// min_p, top_k and top_p of one row whose columns are spread over the ranks: finds the border in
// the order (larger logit first, then lower id) without gathering the logits.
//
// A first histogram over the softmax mass says in which bucket the border lies; histograms over
// ever narrower ranges of logits follow until so few ids are left that they can be told one by one,
// or until a cell is a single logit, whose ids are taken lowest first. Counts and masses are
// integers, so the border is the same at every N. Each rank then offers its best id above the
// border (Gumbel-max) together with the ids near it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "runtime/logit_scan.h"
#include "runtime/softmax_mass.h"

namespace lockstep {

// An id that may win.
struct Candidate {
  double score = -std::numeric_limits<double>::infinity();  // logit / temperature + noise
  float logit = kMinusInfinity;                             // adjusted
  float raw = 0;                                            // where log probabilities are wanted
  int32_t id = -1;                                          // -1: none
  int32_t unused = 0;
};
// Sorts by the order of the filters.
inline bool BetterLogit(const Candidate& a, const Candidate& b) {
  return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
}
inline bool BetterScore(const Candidate& a, const Candidate& b) {
  return a.score != b.score ? a.score > b.score : a.id < b.id;
}

struct FilterLimits {
  double top_p = 1;   // 1: off
  double min_p = 0;   // 0: off
  int64_t top_k = 0;  // 0: off
  double scale = 1;   // MassScale of the temperature

  bool needs_histogram() const { return top_k > 0 || top_p < 1; }
};

// The smallest key that min_p keeps.
uint32_t MinPKey(float max, double scale, double min_p);

// The same state on all ranks, but for what says "mine". Not thread-safe.
class RowFilter {
 public:
  // maxima[r] and histograms[r] (null unless needs_histogram) are rank r's.
  void Start(const FilterLimits& limits, std::span<const float> maxima,
             std::span<const MassHistogram* const> histograms, int my_rank);

  // Until done(): what each rank has to send, and what came from all, in turns.
  int64_t MessageBytes(int rank) const;
  // Calls offer(id, logit) for the full candidate of one of my ids and best(survivors) for my best
  // among those.
  template <typename Offer, typename FindBest>
  void WriteMessage(const LogitSlice& slice, const Offer& offer, const FindBest& find_best,
                    std::byte* out) const;
  void ReadMessages(std::span<const std::byte* const> messages);

  bool done() const { return round_ == Round::kDone; }
  const Candidate& winner() const { return winner_; }

 private:
  enum class Round { kCells, kCandidates, kDone };
  enum class Stage { kStart, kMinP, kTopK, kTopP, kRace };

  void NextStage();
  void AddHistogram(const MassHistogram& histogram, float rank_max);
  int BucketOffset(float rank_max) const;
  bool is_last(Stage stage) const;
  void BeginCut();     // of stage_: finds the bucket of the border
  void ChooseRound();  // for the border in [low_, high_]
  void SetBucketRange();
  bool Reaches(uint64_t count, Mass mass) const;  // the border of stage_ is not below
  void ReadCells(std::span<const std::byte* const> messages);
  void ResolveTies(uint64_t available);
  void KeepOfBucket(uint64_t count, uint64_t mantissas);
  void ReadCandidates(std::span<const std::byte* const> messages);
  Survivors MySurvivors(const LogitSlice& slice) const;
  void WriteCells(const LogitSlice& slice, std::byte* out) const;

  FilterLimits limits_;
  int my_rank_ = 0;
  float max_ = 0;
  MassBuckets buckets_;
  Stage stage_ = Stage::kStart;
  Round round_ = Round::kDone;

  // Survivors of the stages so far, over all ranks.
  uint64_t bucket_count_[kMassBuckets + 1];
  uint64_t bucket_mantissas_[kMassBuckets + 1];  // the last: 0
  uint32_t floor_ = kLowestKey;
  int64_t my_ties_ = 0;  // of my ids at the floor, so many, lowest first; kAllTies

  // The border of stage_: in bucket_, keys [low_, high_].
  int bucket_ = 0;
  Mass unit_ = 0;                 // of a mantissa in it
  uint64_t above_count_ = 0;      // above high_
  Mass above_mass_ = 0;           // above high_
  uint64_t in_bucket_count_ = 0;  // of those above high_, the ones in the bucket
  uint64_t in_bucket_mantissas_ = 0;
  double wanted_mass_ = 0;
  KeyCells cells_;
  uint32_t low_ = 0;
  uint32_t high_ = 0;
  bool knows_rank_counts_ = false;
  std::vector<int64_t> rank_counts_;  // [N] ids in [low_, high_], or more

  std::vector<Candidate> merged_;
  Candidate winner_;
};

template <typename Offer, typename FindBest>
void RowFilter::WriteMessage(const LogitSlice& slice, const Offer& offer, const FindBest& find_best,
                             std::byte* out) const {
  if (round_ == Round::kCells) return WriteCells(slice, out);
  auto* candidates = reinterpret_cast<Candidate*>(out);
  if (stage_ == Stage::kRace) {
    candidates[0] = find_best(MySurvivors(slice));
    return;
  }
  candidates[0] = find_best(Survivors{.floor = high_, .tie_end = 0});
  thread_local std::vector<LogitAndId> entries;
  entries.resize(static_cast<size_t>(rank_counts_[static_cast<size_t>(my_rank_)]));
  const int64_t count = CollectRange(slice, low_, high_, MySurvivors(slice), entries);
  for (size_t i = 0; i < entries.size(); ++i) {
    candidates[i + 1] = static_cast<int64_t>(i) < count ? offer(entries[i]) : Candidate{};
  }
}

}  // namespace lockstep
