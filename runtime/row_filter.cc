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

}  // namespace

uint32_t MinPKey(float max, double scale, double min_p) {
  return FirstKey(kLowestKey, OrderKey(max),
                  [&](float logit) { return RelativeMass(logit, max, scale) >= min_p; });
}

void RowFilter::Start(const FilterLimits& limits, std::span<const float> maxima,
                      std::span<const MassHistogram* const> histograms, int my_rank) {
  limits_ = limits;
  my_rank_ = my_rank;
  max_ = *std::max_element(maxima.begin(), maxima.end());
  buckets_ = {.scale = limits.scale, .top = MassStep(max_, limits.scale)};
  stage_ = Stage::kStart;
  floor_ = kLowestKey;
  my_ties_ = kAllTies;
  rank_counts_.assign(maxima.size(), 0);
  if (limits.needs_histogram()) {
    std::fill(std::begin(bucket_count_), std::end(bucket_count_), 0);
    std::fill(std::begin(bucket_mantissas_), std::end(bucket_mantissas_), 0);
    for (size_t rank = 0; rank < maxima.size(); ++rank) {
      AddHistogram(*histograms[rank], maxima[rank]);
    }
  }
  NextStage();
  if (stage_ == Stage::kMinP || stage_ == Stage::kRace) return;
  // The border's bucket is the first question, so the histograms also say how many ids each rank
  // has in it, or at least, when min_p took some, how many at most.
  for (size_t rank = 0; rank < maxima.size(); ++rank) {
    const int offset = BucketOffset(maxima[rank]);
    for (int bucket = 0; bucket <= kMassBuckets; ++bucket) {
      if (std::min(bucket + offset, kMassBuckets) == bucket_) {
        rank_counts_[rank] += histograms[rank]->count[bucket];
      }
    }
  }
  knows_rank_counts_ = true;
  ChooseRound();
}

// Buckets by which a rank's histogram is lower than the merged one.
int RowFilter::BucketOffset(float rank_max) const {
  const double steps = buckets_.top - MassStep(rank_max, limits_.scale);
  return steps < kMassBuckets ? static_cast<int>(steps) : kMassBuckets;
}

void RowFilter::AddHistogram(const MassHistogram& histogram, float rank_max) {
  const int offset = BucketOffset(rank_max);
  for (int bucket = 0; bucket <= kMassBuckets; ++bucket) {
    bucket_count_[std::min(bucket + offset, kMassBuckets)] += histogram.count[bucket];
  }
  for (int bucket = 0; bucket + offset < kMassBuckets; ++bucket) {
    bucket_mantissas_[bucket + offset] += histogram.mantissas[bucket];
  }
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
      bucket_ = buckets_.bucket(FromOrderKey(floor_));
      if (bucket_count_[bucket_] > 0) {
        // One cell: what is left of the bucket in which the floor lies.
        SetBucketRange();
        cells_ = {.low = low_, .high = high_, .shift = 32};
        round_ = Round::kCells;
        return;
      }
      KeepOfBucket(0, 0);
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
  for (int bucket = 0; bucket < kMassBuckets; ++bucket) {
    total += buckets_.unit(bucket) * bucket_mantissas_[bucket];
  }
  wanted_mass_ = std::max(limits_.top_p * static_cast<double>(total), 1.0);  // at least one id
  above_count_ = 0;
  above_mass_ = 0;
  for (bucket_ = 0; bucket_ < kMassBuckets; ++bucket_) {
    const Mass mass = buckets_.unit(bucket_) * bucket_mantissas_[bucket_];
    if (Reaches(above_count_ + bucket_count_[bucket_], above_mass_ + mass)) break;
    above_count_ += bucket_count_[bucket_];
    above_mass_ += mass;
  }
  in_bucket_count_ = in_bucket_mantissas_ = 0;
  unit_ = buckets_.unit(bucket_);
  SetBucketRange();
  knows_rank_counts_ = false;
  ChooseRound();
}

// low_, high_: the keys of bucket_ that are left.
void RowFilter::SetBucketRange() {
  const uint32_t max_key = OrderKey(max_);
  const auto first_in = [&](int bucket) {
    return FirstKey(kLowestKey, max_key,
                    [&](float logit) { return buckets_.bucket(logit) <= bucket; });
  };
  low_ = std::max(first_in(bucket_), floor_);
  high_ = bucket_ == 0 ? max_key : first_in(bucket_ - 1) - 1;
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
      mantissas += histogram(rank).mantissas[cell];
    }
  };
  if (stage_ == Stage::kMinP) {
    sum_cell(0);
    KeepOfBucket(count, mantissas);
    return NextStage();
  }
  int cell = cells_.cell(cells_.high);
  for (;; --cell) {
    LOCKSTEP_CHECK(cell >= 0);  // the cells hold what the bucket holds
    sum_cell(cell);
    if (Reaches(above_count_ + count, above_mass_ + unit_ * mantissas)) break;
    above_count_ += count;
    above_mass_ += unit_ * mantissas;
    in_bucket_count_ += count;
    in_bucket_mantissas_ += mantissas;
  }
  for (size_t rank = 0; rank < messages.size(); ++rank) {
    rank_counts_[rank] = histogram(rank).count[cell];
  }
  knows_rank_counts_ = true;
  low_ = cells_.low + (static_cast<uint32_t>(cell) << cells_.shift);
  high_ = std::min(high_, low_ + ((uint32_t{1} << cells_.shift) - 1));
  if (low_ < high_) return ChooseRound();
  ResolveTies(count);
  NextStage();
}

// All `available` ids in question have the logit of low_: takes as many as the border wants, lowest
// ids first.
void RowFilter::ResolveTies(uint64_t available) {
  const uint64_t mantissa = Mantissa(FromOrderKey(low_), limits_.scale);
  uint64_t taken = 1;
  for (uint64_t most = available; taken < most;) {
    const uint64_t middle = taken + (most - taken) / 2;
    if (Reaches(above_count_ + middle, above_mass_ + unit_ * mantissa * middle)) {
      most = middle;
    } else {
      taken = middle + 1;
    }
  }
  auto mine = static_cast<int64_t>(taken);
  for (int rank = 0; rank < my_rank_; ++rank) mine -= rank_counts_[static_cast<size_t>(rank)];
  my_ties_ = std::clamp<int64_t>(mine, 0, rank_counts_[static_cast<size_t>(my_rank_)]);
  floor_ = low_;
  KeepOfBucket(in_bucket_count_ + taken, in_bucket_mantissas_ + mantissa * taken);
}

// So much of bucket_ is left, and nothing below.
void RowFilter::KeepOfBucket(uint64_t count, uint64_t mantissas) {
  bucket_count_[bucket_] = count;
  bucket_mantissas_[bucket_] = bucket_ == kMassBuckets ? 0 : mantissas;
  std::fill(bucket_count_ + bucket_ + 1, std::end(bucket_count_), 0);
  std::fill(bucket_mantissas_ + bucket_ + 1, std::end(bucket_mantissas_), 0);
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
    above_mass_ += buckets_.mass(candidate.logit);
    offer(candidate);
  }
  round_ = Round::kDone;
}

}  // namespace lockstep
