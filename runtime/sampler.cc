#include "runtime/sampler.h"

#include <algorithm>
#include <bit>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

namespace lockstep {

namespace {

constexpr int32_t kNoId = -1;
constexpr int32_t kBadLogits = -2;

// Rounds of ExchangeCandidates for rows with top_p alone: nearly always the first one is enough.
constexpr int64_t kCandidateRounds[] = {1024, 16384, std::numeric_limits<int64_t>::max()};
// Bound on the memory of one exchange, unless a single row needs more.
constexpr int64_t kMaxExchangeBytes = 64 << 20;

// The finaliser of SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number
// generators", 2014).
constexpr uint64_t kGoldenGamma = 0x9e3779b97f4a7c15;
constexpr uint64_t Mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

// The 64 random bits of id i are element i of the SplitMix64 stream that starts at RowKey.
uint64_t RowKey(uint64_t seed, int64_t position) {
  return Mix(Mix(seed + kGoldenGamma) ^ (static_cast<uint64_t>(position) * kGoldenGamma));
}
uint64_t RandomBits(uint64_t row_key, int64_t id) {
  return Mix(row_key + (static_cast<uint64_t>(id) + 1) * kGoldenGamma);
}

// -log(-log(u)) for u = 1 - e, e uniform in (0, 1): the large values, which win, come from small e
// and keep full precision.
double GumbelFromBits(uint64_t bits) {
  const double e = (static_cast<double>(bits >> 11) + 0.5) * 0x1p-53;
  return -std::log(-std::log1p(-e));
}

// At least GumbelFromBits: it is below -log(e), and e >= 2^-(leading zeros + 1).
double GumbelBound(uint64_t bits) {
  constexpr double kLn2 = 0.69314718055994530942;
  return (std::countl_zero(bits | 0x400) + 1) * kLn2 + 1e-9;
}

// Softmax mass in units of 2^-40 of the largest logit's: integers sum to the same total in any
// order, so top_p cuts alike at every N. Fits 64 bits for V < 2^23.
uint64_t Weight(float logit, float max_logit, double temperature) {
  const double x = (static_cast<double>(logit) - max_logit) / temperature;
  if (x < -28) return 0;  // below one unit
  return static_cast<uint64_t>(std::exp(x) * 0x1p40);
}

// The largest of logits[0, count), or NaN when there is a NaN or +infinity. Lanes, and one thing a
// loop, so that the compiler uses vector instructions.
float MaxLogit(const float* logits, int64_t count) {
  constexpr int kLanes = 16;
  float max[kLanes];
  int32_t bad[kLanes] = {};
  std::fill_n(max, kLanes, -std::numeric_limits<float>::infinity());
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const float* x = logits + i;
    for (int lane = 0; lane < kLanes; ++lane) max[lane] = x[lane] > max[lane] ? x[lane] : max[lane];
    for (int lane = 0; lane < kLanes; ++lane) bad[lane] |= !(x[lane] <= FLT_MAX);
  }
  for (; i < count; ++i) {
    max[0] = logits[i] > max[0] ? logits[i] : max[0];
    bad[0] |= !(logits[i] <= FLT_MAX);
  }
  if (*std::max_element(bad, bad + kLanes) != 0) return std::numeric_limits<float>::quiet_NaN();
  return *std::max_element(max, max + kLanes);
}

// The Gumbel-max trick over ids that are offered one by one.
class GumbelRace {
 public:
  explicit GumbelRace(const SampleRow& row)
      : row_key_(RowKey(row.seed, row.position)), temperature_(row.temperature) {}

  // Lower ids win ties. Only ids whose noise may lift them over the best so far pay for two
  // logarithms.
  void Offer(float logit, int32_t id) {
    const double scaled = logit / temperature_;
    const uint64_t bits = RandomBits(row_key_, id);
    if (scaled + GumbelBound(bits) < score_) return;
    const double score = scaled + GumbelFromBits(bits);
    if (score > score_ || (score == score_ && id < id_)) {
      score_ = score;
      id_ = id;
    }
  }
  double score() const { return score_; }
  int32_t id() const { return id_; }

 private:
  const uint64_t row_key_;
  const double temperature_;
  double score_ = -std::numeric_limits<double>::infinity();
  int32_t id_ = kNoId;
};

}  // namespace

double GumbelNoise(uint64_t seed, int64_t position, int64_t id) {
  return GumbelFromBits(RandomBits(RowKey(seed, position), id));
}

Sampler::Sampler(std::vector<Range> vocab_ranges, Communicator& communicator, ThreadPool& threads)
    : vocab_ranges_(std::move(vocab_ranges)),
      vocab_(vocab_ranges_[static_cast<size_t>(communicator.rank())]),
      communicator_(communicator),
      threads_(threads),
      next_(vocab_ranges_.size()) {
  LOCKSTEP_CHECK(static_cast<int>(vocab_ranges_.size()) == communicator.size());
  LOCKSTEP_CHECK(vocab_ranges_.back().end < (int64_t{1} << 23));
  for (const Range& range : vocab_ranges_) {
    max_local_vocab_ = std::max(max_local_vocab_, range.size());
  }
}

absl::Status Sampler::Sample(const MatrixView& logits, std::span<const SampleRow> rows,
                             std::span<int32_t> tokens) {
  LOCKSTEP_CHECK(logits.dtype == DType::kF32 && logits.cols >= vocab_.size());
  LOCKSTEP_CHECK(rows.size() == tokens.size());
  if (rows.empty()) return absl::OkStatus();
  LOCKSTEP_RETURN_IF_ERROR(PickBest(logits, rows, tokens));
  const int64_t num_ranks = communicator_.size();
  for (const int64_t max_candidates : kCandidateRounds) {
    for (size_t begin = 0; begin < pending_.size();) {
      size_t end = begin;
      for (int64_t bytes = 0; end < pending_.size(); ++end) {
        const int64_t capacity = Capacity(rows[pending_[end]], max_candidates);
        bytes += num_ranks * capacity * static_cast<int64_t>(sizeof(Candidate));
        if (bytes > kMaxExchangeBytes && end > begin) break;
      }
      const std::span<const int32_t> batch(pending_.data() + begin, end - begin);
      LOCKSTEP_RETURN_IF_ERROR(ExchangeCandidates(logits, rows, batch, max_candidates, tokens));
      begin = end;
    }
    std::erase_if(pending_, [&](int32_t row) { return tokens[row] != kNoId; });
    if (pending_.empty()) return absl::OkStatus();
  }
  return absl::InternalError("sampler: a row has no token after all logits were exchanged");
}

Sampler::Best Sampler::FindBest(const float* logits, const SampleRow& row) const {
  const float max = MaxLogit(logits, vocab_.size());
  if (std::isnan(max)) return {.id = kBadLogits};
  if (max == -std::numeric_limits<float>::infinity())
    return {.score = max, .logit = max, .id = kNoId};
  if (row.greedy() || row.filtered()) {
    const int64_t index = std::find(logits, logits + vocab_.size(), max) - logits;
    return {.score = max, .logit = max, .id = static_cast<int32_t>(vocab_.begin + index)};
  }
  GumbelRace race(row);
  for (int64_t i = 0; i < vocab_.size(); ++i) {
    race.Offer(logits[i], static_cast<int32_t>(vocab_.begin + i));
  }
  return {.score = race.score(), .logit = max, .id = race.id()};
}

absl::Status Sampler::PickBest(const MatrixView& logits, std::span<const SampleRow> rows,
                               std::span<int32_t> tokens) {
  const size_t num_ranks = vocab_ranges_.size();
  my_best_.resize(rows.size());
  all_best_.resize(rows.size() * num_ranks);
  max_logits_.resize(rows.size());
  pending_.clear();
  threads_.ParallelFor(static_cast<int64_t>(rows.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      my_best_[i] = FindBest(logits.row<float>(rows[i].logits_row), rows[i]);
    }
  });
  LOCKSTEP_RETURN_IF_ERROR(communicator_.AllGather(
      my_best_.data(), static_cast<int64_t>(rows.size() * sizeof(Best)), all_best_.data()));
  for (size_t i = 0; i < rows.size(); ++i) {
    // Ranks hold ascending ids, so the first of equal scores has the lowest id.
    Best best = all_best_[i];
    for (size_t rank = 1; rank < num_ranks && best.id != kBadLogits; ++rank) {
      const Best& other = all_best_[rank * rows.size() + i];
      if (other.id == kBadLogits || best.id == kNoId || other.score > best.score) best = other;
    }
    tokens[i] = best.id < 0 ? kFailedToken : best.id;
    max_logits_[i] = best.logit;
    if (best.id >= 0 && rows[i].filtered()) {
      tokens[i] = kNoId;
      pending_.push_back(static_cast<int32_t>(i));
    }
  }
  return absl::OkStatus();
}

// The k best of all ids are among the k best of each rank. Without top_k, what is sent may be too
// little, and then the row goes into the next round.
int64_t Sampler::Capacity(const SampleRow& row, int64_t max_candidates) const {
  return std::min(row.top_k > 0 ? row.top_k : max_candidates, max_local_vocab_);
}

absl::Status Sampler::ExchangeCandidates(const MatrixView& logits, std::span<const SampleRow> rows,
                                         std::span<const int32_t> batch, int64_t max_candidates,
                                         std::span<int32_t> tokens) {
  const int64_t num_rows = static_cast<int64_t>(batch.size());
  offsets_.resize(batch.size());
  int64_t rank_bytes = 0;
  for (int64_t i = 0; i < num_rows; ++i) {
    offsets_[i] = rank_bytes;
    rank_bytes +=
        static_cast<int64_t>(sizeof(CandidateHeader)) +
        Capacity(rows[batch[i]], max_candidates) * static_cast<int64_t>(sizeof(Candidate));
  }
  send_.resize(static_cast<size_t>(rank_bytes));
  receive_.resize(static_cast<size_t>(rank_bytes) * vocab_ranges_.size());
  threads_.ParallelFor(num_rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const SampleRow& row = rows[batch[i]];
      CollectCandidates(logits.row<float>(row.logits_row), row, max_logits_[batch[i]],
                        Capacity(row, max_candidates), send_.data() + offsets_[i]);
    }
  });
  LOCKSTEP_RETURN_IF_ERROR(communicator_.AllGather(send_.data(), rank_bytes, receive_.data()));
  for (int64_t i = 0; i < num_rows; ++i) {
    tokens[batch[i]] = PickFromCandidates(rows[batch[i]], max_logits_[batch[i]],
                                          receive_.data() + offsets_[i], rank_bytes);
  }
  return absl::OkStatus();
}

void Sampler::CollectCandidates(const float* logits, const SampleRow& row, float max_logit,
                                int64_t capacity, std::byte* out) const {
  const auto better = [](const Candidate& a, const Candidate& b) {
    return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
  };
  CandidateHeader header;
  // Collects what may be among the best; at twice the capacity, keeps the better half. So the cost
  // is linear in V whatever the order of the logits.
  std::vector<Candidate> kept;
  kept.reserve(static_cast<size_t>(std::min(2 * capacity, vocab_.size())));
  float bar = -std::numeric_limits<float>::infinity();
  const auto shrink = [&] {
    if (static_cast<int64_t>(kept.size()) <= capacity) return;
    std::nth_element(kept.begin(), kept.begin() + capacity - 1, kept.end(), better);
    kept.resize(static_cast<size_t>(capacity));
    bar = kept.back().logit;
  };
  const bool needs_mass = row.top_k == 0;
  for (int64_t i = 0; i < vocab_.size(); ++i) {
    if (needs_mass) header.mass += Weight(logits[i], max_logit, row.temperature);
    if (logits[i] < bar) continue;
    kept.push_back({logits[i], static_cast<int32_t>(vocab_.begin + i)});
    if (static_cast<int64_t>(kept.size()) == 2 * capacity) shrink();
  }
  shrink();
  std::sort(kept.begin(), kept.end(), better);
  header.count = static_cast<int64_t>(kept.size());
  std::memcpy(out, &header, sizeof(header));
  std::memcpy(out + sizeof(header), kept.data(), kept.size() * sizeof(Candidate));
}

bool Sampler::MergeNext(const std::byte* first, int64_t rank_bytes) {
  int best_rank = -1;
  Candidate best;
  for (size_t rank = 0; rank < vocab_ranges_.size(); ++rank) {
    const std::byte* message = first + static_cast<int64_t>(rank) * rank_bytes;
    CandidateHeader header;
    std::memcpy(&header, message, sizeof(header));
    if (next_[rank] == header.count) {
      if (header.count < vocab_ranges_[rank].size()) return false;
      continue;
    }
    Candidate candidate;
    std::memcpy(&candidate,
                message + sizeof(header) + next_[rank] * static_cast<int64_t>(sizeof(Candidate)),
                sizeof(candidate));
    if (best_rank < 0 || candidate.logit > best.logit) {
      best_rank = static_cast<int>(rank);
      best = candidate;
    }
  }
  if (best_rank < 0) return false;
  ++next_[best_rank];
  merged_.push_back(best);
  return true;
}

int32_t Sampler::PickFromCandidates(const SampleRow& row, float max_logit, const std::byte* first,
                                    int64_t rank_bytes) {
  merged_.clear();
  std::fill(next_.begin(), next_.end(), 0);
  const auto weight = [&](const Candidate& c) {
    return Weight(c.logit, max_logit, row.temperature);
  };
  uint64_t total = 0;
  if (row.top_k > 0) {
    while (static_cast<int64_t>(merged_.size()) < row.top_k && MergeNext(first, rank_bytes)) {
      total += weight(merged_.back());
    }
  } else {
    for (size_t rank = 0; rank < vocab_ranges_.size(); ++rank) {
      CandidateHeader header;
      std::memcpy(&header, first + static_cast<int64_t>(rank) * rank_bytes, sizeof(header));
      total += header.mass;
    }
  }
  // The smallest set that reaches top_p.
  size_t kept = merged_.size();
  if (row.top_p < 1) {
    const double wanted = row.top_p * static_cast<double>(total);
    uint64_t mass = 0;
    for (kept = 0; static_cast<double>(mass) < wanted; ++kept) {
      if (kept == merged_.size() && !MergeNext(first, rank_bytes)) return kNoId;
      mass += weight(merged_[kept]);
    }
  }
  GumbelRace race(row);
  for (size_t i = 0; i < kept; ++i) race.Offer(merged_[i].logit, merged_[i].id);
  return race.id();
}

}  // namespace lockstep
