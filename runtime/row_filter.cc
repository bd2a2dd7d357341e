#include "runtime/row_filter.h"

#include <algorithm>
#include <cstring>

#include "runtime/core/status.h"

namespace lockstep {

namespace {

// So many ids around the border, of all ranks together, are told one by one.
constexpr int64_t kMaxBorderIds = 1024;
constexpr int64_t kAllTies = std::numeric_limits<int64_t>::max();

// The smallest key of [low, high] for which `holds`, which holds at high and, once true, stays so.
template <typename Predicate>
uint32_t FirstKey(uint32_t low, uint32_t high, const Predicate& holds) {
  while (low < high) {
    const uint32_t middle = low + (high - low) / 2;
    if (holds(FromOrderKey(middle))) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

// Buckets by which a rank's histogram is lower than the merged one.
int BucketOffset(float rank_max, double scale, double top_octave) {
  const double octaves = top_octave - Octave(rank_max, scale);
  return octaves < kOctaves ? static_cast<int>(octaves) * kBucketsPerOctave : kMassBuckets;
}

}  // namespace

uint32_t MinPKey(float max, double scale, double min_p) {
  return FirstKey(kLowestKey, OrderKey(max),
                  [&](float logit) { return RelativeMass(logit, max, scale) >= min_p; });
}

Mass MassOf(float logit, double scale, double top_octave) {
  const int bucket = MassBucket(logit, scale, top_octave);
  if (bucket == kMassBuckets) return 0;
  return Mass{Mantissa(logit, scale)} << (kOctaves - 1 - bucket / kBucketsPerOctave);
}

Mass RowFilter::BucketMass(uint64_t mantissas) const {
  if (bucket_ == kMassBuckets) return 0;
  return Mass{mantissas} << (kOctaves - 1 - bucket_ / kBucketsPerOctave);
}

void RowFilter::Start(const FilterLimits& limits, std::span<const float> maxima,
                      std::span<const MassHistogram* const> histograms, int my_rank) {
  limits_ = limits;
  my_rank_ = my_rank;
  num_ranks_ = static_cast<int>(maxima.size());
  max_ = *std::max_element(maxima.begin(), maxima.end());
  top_octave_ = Octave(max_, limits.scale);
  stage_ = Stage::kStart;
  floor_ = kLowestKey;
  my_ties_ = kAllTies;
  knows_rank_counts_ = false;
  rank_counts_.assign(maxima.size(), 0);
  if (limits.needs_histogram()) {
    std::fill(std::begin(bucket_count_), std::end(bucket_count_), 0);
    std::fill(std::begin(bucket_mantissas_), std::end(bucket_mantissas_), 0);
    for (size_t rank = 0; rank < maxima.size(); ++rank) {
      const MassHistogram& histogram = *histograms[rank];
      const int offset = BucketOffset(maxima[rank], limits.scale, top_octave_);
      for (int bucket = 0; bucket <= kMassBuckets; ++bucket) {
        bucket_count_[std::min(bucket + offset, kMassBuckets)] += histogram.count[bucket];
      }
      for (int bucket = 0; bucket + offset < kMassBuckets; ++bucket) {
        bucket_mantissas_[bucket + offset] += histogram.mass[bucket];
      }
    }
  }
  NextStage();
  // Where the border's bucket is the first question, the histograms also say what each rank has in
  // it.
  if (round_ != Round::kCells || stage_ == Stage::kMinP) return;
  for (size_t rank = 0; rank < maxima.size(); ++rank) {
    const int offset = BucketOffset(maxima[rank], limits.scale, top_octave_);
    for (int bucket = 0; bucket <= kMassBuckets; ++bucket) {
      if (std::min(bucket + offset, kMassBuckets) == bucket_) {
        rank_counts_[rank] += histograms[rank]->count[bucket];
      }
    }
  }
  knows_rank_counts_ = true;
  ChooseRound();
}

bool RowFilter::is_last(Stage stage) const {
  if (stage == Stage::kMinP) return limits_.top_k == 0 && limits_.top_p >= 1;
  return stage != Stage::kTopK || limits_.top_p >= 1;
}

void RowFilter::NextStage() {
  if (stage_ < Stage::kMinP && limits_.min_p > 0) {
    stage_ = Stage::kMinP;
    floor_ = MinPKey(max_, limits_.scale, limits_.min_p);
    if (!is_last(stage_)) {
      // One cell: what is left of the bucket in which the floor lies.
      bucket_ = MassBucket(FromOrderKey(floor_), limits_.scale, top_octave_);
      SetBucketRange(bucket_);
      cells_ = {.low = low_, .high = high_, .shift = 32};
      round_ = Round::kCells;
      return;
    }
  }
  if (stage_ < Stage::kTopK && limits_.top_k > 0) {
    uint64_t total = 0;
    for (const uint64_t count : bucket_count_) total += count;
    if (total > static_cast<uint64_t>(limits_.top_k)) {
      stage_ = Stage::kTopK;
      return BeginCut();
    }
  }
  if (stage_ < Stage::kTopP && limits_.top_p < 1) {
    stage_ = Stage::kTopP;
    return BeginCut();
  }
  stage_ = Stage::kRace;
  round_ = Round::kCandidates;
  std::fill(rank_counts_.begin(), rank_counts_.end(), 0);
}

bool RowFilter::Reaches(uint64_t count, Mass mass) const {
  if (stage_ == Stage::kTopK) return count >= static_cast<uint64_t>(limits_.top_k);
  return static_cast<double>(mass) >= wanted_mass_;
}

void RowFilter::BeginCut() {
  Mass total = 0;
  for (bucket_ = 0; bucket_ < kMassBuckets; ++bucket_) {
    total += BucketMass(bucket_mantissas_[bucket_]);
  }
  wanted_mass_ = std::max(limits_.top_p * static_cast<double>(total), 1.0);  // at least one id
  uint64_t count = 0;
  Mass mass = 0;
  for (bucket_ = 0; bucket_ < kMassBuckets; ++bucket_) {
    const Mass here = BucketMass(bucket_mantissas_[bucket_]);
    if (Reaches(count + bucket_count_[bucket_], mass + here)) break;
    count += bucket_count_[bucket_];
    mass += here;
  }
  above_bucket_count_ = above_count_ = count;
  above_bucket_mass_ = above_mass_ = mass;
  SetBucketRange(bucket_);
  knows_rank_counts_ = false;
  ChooseRound();
}

void RowFilter::SetBucketRange(int bucket) {
  const uint32_t max_key = OrderKey(max_);
  const auto first_in = [&](int b) {
    return FirstKey(kLowestKey, max_key, [&](float logit) {
      return MassBucket(logit, limits_.scale, top_octave_) <= b;
    });
  };
  low_ = std::max(first_in(bucket), floor_);
  // A bucket may lie above that of the largest logit, but then nothing is in it.
  high_ =
      MassBucket(max_, limits_.scale, top_octave_) == bucket ? max_key : first_in(bucket - 1) - 1;
}

void RowFilter::ChooseRound() {
  int64_t count = 0;
  for (const int64_t rank_count : rank_counts_) count += rank_count;
  if (is_last(stage_) && knows_rank_counts_ && count <= kMaxBorderIds) {
    round_ = Round::kCandidates;
    return;
  }
  cells_ = {.low = low_,
            .high = high_,
            .shift = std::max(0, static_cast<int>(std::bit_width(high_ - low_)) - kCellBits)};
  round_ = Round::kCells;
}

int64_t RowFilter::MessageBytes(int rank) const {
  if (round_ == Round::kCells) return static_cast<int64_t>(sizeof(CellHistogram));
  return static_cast<int64_t>(sizeof(Candidate)) * (1 + rank_counts_[static_cast<size_t>(rank)]);
}

Survivors RowFilter::MySurvivors(const LogitSlice& slice) const {
  return {.floor = floor_,
          .tie_end = my_ties_ == kAllTies ? slice.size() : FindTieEnd(slice, floor_, my_ties_)};
}

void RowFilter::WriteCells(const LogitSlice& slice, std::byte* out) const {
  FillCellHistogram(slice, cells_, MySurvivors(slice), limits_.scale,
                    *reinterpret_cast<CellHistogram*>(out));
}

void RowFilter::ReadMessages(std::span<const std::byte* const> messages) {
  if (round_ == Round::kCells) {
    ReadCells(messages);
  } else {
    ReadCandidates(messages);
  }
}

void RowFilter::ReadCells(std::span<const std::byte* const> messages) {
  const auto histogram = [&](size_t rank) -> const CellHistogram& {
    return *reinterpret_cast<const CellHistogram*>(messages[rank]);
  };
  uint64_t count = 0;
  uint64_t mantissas = 0;
  const auto sum_cell = [&](int cell) {
    count = mantissas = 0;
    for (size_t rank = 0; rank < messages.size(); ++rank) {
      count += histogram(rank).count[cell];
      mantissas += histogram(rank).mass[cell];
    }
  };
  if (stage_ == Stage::kMinP) {
    sum_cell(0);
    KeepOfBucket(count, BucketMass(mantissas));
    return NextStage();
  }
  int cell = cells_.cell(cells_.high);
  for (;; --cell) {
    LOCKSTEP_CHECK(cell >= 0);  // the cells hold what the bucket holds
    sum_cell(cell);
    if (Reaches(above_count_ + count, above_mass_ + BucketMass(mantissas))) break;
    above_count_ += count;
    above_mass_ += BucketMass(mantissas);
  }
  for (size_t rank = 0; rank < messages.size(); ++rank) {
    rank_counts_[rank] = histogram(rank).count[cell];
  }
  knows_rank_counts_ = true;
  low_ = cells_.low + (static_cast<uint32_t>(cell) << cells_.shift);
  high_ = std::min(high_, low_ + ((uint32_t{1} << cells_.shift) - 1));
  if (low_ < high_) return ChooseRound();
  ResolveTies(Mantissa(FromOrderKey(low_), limits_.scale), count);
  NextStage();
}

// All ids in question have the logit low_: takes as many as the border wants, lowest ids first.
void RowFilter::ResolveTies(uint64_t mantissa, uint64_t available) {
  const Mass mass = BucketMass(mantissa);
  uint64_t fewest = 1;
  for (uint64_t most = available; fewest < most;) {
    const uint64_t middle = fewest + (most - fewest) / 2;
    if (Reaches(above_count_ + middle, above_mass_ + mass * middle)) {
      most = middle;
    } else {
      fewest = middle + 1;
    }
  }
  int64_t mine = static_cast<int64_t>(fewest);
  for (int rank = 0; rank < my_rank_; ++rank) mine -= rank_counts_[static_cast<size_t>(rank)];
  my_ties_ = std::clamp<int64_t>(mine, 0, rank_counts_[static_cast<size_t>(my_rank_)]);
  floor_ = low_;
  KeepOfBucket(above_count_ + fewest - above_bucket_count_,
               above_mass_ + mass * fewest - above_bucket_mass_);
}

void RowFilter::KeepOfBucket(uint64_t count, Mass mass) {
  bucket_count_[bucket_] = count;
  if (bucket_ < kMassBuckets) {
    bucket_mantissas_[bucket_] =
        static_cast<uint64_t>(mass >> (kOctaves - 1 - bucket_ / kBucketsPerOctave));
  }
  for (int lower = bucket_ + 1; lower <= kMassBuckets; ++lower) {
    bucket_count_[lower] = 0;
    if (lower < kMassBuckets) bucket_mantissas_[lower] = 0;
  }
}

void RowFilter::ReadCandidates(std::span<const std::byte* const> messages) {
  winner_ = {};
  merged_.clear();
  const auto offer = [&](const Candidate& candidate) {
    if (candidate.id >= 0 && (winner_.id < 0 || BetterScore(candidate, winner_))) {
      winner_ = candidate;
    }
  };
  for (size_t rank = 0; rank < messages.size(); ++rank) {
    const auto* candidates = reinterpret_cast<const Candidate*>(messages[rank]);
    offer(candidates[0]);
    for (int64_t i = 1; i <= rank_counts_[rank]; ++i) {
      if (candidates[i].id >= 0) merged_.push_back(candidates[i]);
    }
  }
  std::sort(merged_.begin(), merged_.end(), BetterLogit);
  for (const Candidate& candidate : merged_) {
    if (above_count_ > 0 && Reaches(above_count_, above_mass_)) break;
    ++above_count_;
    above_mass_ += MassOf(candidate.logit, limits_.scale, top_octave_);
    offer(candidate);
  }
  round_ = Round::kDone;
}

}  // namespace lockstep
