#include "runtime/sampler.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

namespace lockstep {

namespace {

constexpr int32_t kBadLogits = -2;  // the id of a rank's Candidate when the row holds NaN or +inf

constexpr int64_t kCandidateBytes = static_cast<int64_t>(sizeof(Candidate));
constexpr int64_t kDigestBytes = static_cast<int64_t>(sizeof(uint64_t));

}  // namespace

Sampler::Sampler(std::vector<Range> vocab_ranges, Communicator& communicator, ThreadPool& threads)
    : vocab_ranges_(std::move(vocab_ranges)),
      vocab_(vocab_ranges_[static_cast<size_t>(communicator.rank())]),
      communicator_(communicator),
      threads_(threads),
      rank_bytes_(vocab_ranges_.size()),
      rank_begin_(vocab_ranges_.size()) {
  LOCKSTEP_CHECK(static_cast<int>(vocab_ranges_.size()) == communicator.size());
  LOCKSTEP_CHECK(vocab_ranges_.back().end < (int64_t{1} << 23));
}

template <typename Fn>
void Sampler::ForEach(size_t count, const Fn& fn) {
  // One captured reference: std::function keeps it without allocating.
  threads_.ParallelFor(static_cast<int64_t>(count), 1, [&fn](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) fn(static_cast<size_t>(i));
  });
}

absl::Status Sampler::Sample(const MatrixView& logits, std::span<const SampleRow> rows,
                             uint64_t digest, SampleOutput& output) {
  LOCKSTEP_CHECK(logits.dtype == DType::kF32 && logits.cols >= vocab_.size());
  output.tokens.resize(rows.size());
  if (rows.empty()) {
    output.logprobs.clear();
    output.digests.clear();
    return absl::OkStatus();
  }
  first_bytes_ = PlanFirstMessage(rows);
  send_.resize(static_cast<size_t>(first_bytes_));
  first_receive_.resize(static_cast<size_t>(first_bytes_) * num_ranks());
  std::memcpy(send_.data(), &digest, sizeof(digest));
  ForEach(rows.size(), [&](size_t i) { WriteFirst(logits, rows[i], i); });
  LOCKSTEP_RETURN_IF_ERROR(
      communicator_.AllGather(send_.data(), first_bytes_, first_receive_.data()));
  output.digests.resize(num_ranks());
  for (size_t rank = 0; rank < num_ranks(); ++rank) {
    std::memcpy(&output.digests[rank], FirstMessage(rank), sizeof(uint64_t));
  }
  for (size_t i = 0; i < rows.size(); ++i) ReadFirst(i);
  StartFilters();
  LOCKSTEP_RETURN_IF_ERROR(RunFilters(logits, rows));
  WriteOutput(rows, output);
  return absl::OkStatus();
}

Sampler::Kind Sampler::KindOf(const SampleRow& row, FilterLimits& limits) const {
  if (row.greedy()) return Kind::kGreedy;
  limits = {.top_p = row.top_p,
            .min_p = row.min_p,
            .top_k = row.top_k < vocab_ranges_.back().end ? row.top_k : 0,
            .scale = MassScale(row.temperature)};
  if (limits.top_k > 0 && limits.top_k <= kMaxCandidates) return Kind::kCandidates;
  return limits.needs_histogram() || limits.min_p > 0 ? Kind::kFilter : Kind::kDraw;
}

// The digest, a Candidate a row, then what some rows have besides.
int64_t Sampler::PlanFirstMessage(std::span<const SampleRow> rows) {
  if (states_.size() < rows.size()) states_.resize(rows.size());
  winners_.resize(rows.size());
  block_max_.resize(rows.size() * static_cast<size_t>(NumScanBlocks(vocab_.size())));
  int64_t bytes = kDigestBytes + static_cast<int64_t>(rows.size()) * kCandidateBytes;
  for (size_t i = 0; i < rows.size(); ++i) {
    RowState& state = states_[i];
    state.kind = KindOf(rows[i], state.limits);
    state.summary_offset = bytes;
    if (rows[i].num_logprobs >= 0) {
      LOCKSTEP_CHECK(rows[i].num_logprobs <= kMaxLogprobs);
      bytes += LogprobSummaryBytes(rows[i].num_logprobs);
    }
    state.filter_offset = bytes;
    if (state.kind == Kind::kCandidates) {
      bytes += state.limits.top_k * kCandidateBytes;
    } else if (state.kind == Kind::kFilter && state.limits.needs_histogram()) {
      bytes += static_cast<int64_t>(sizeof(MassHistogram));
    }
  }
  return bytes;
}

LogitSlice Sampler::SliceOf(const MatrixView& logits, const SampleRow& row, size_t i) const {
  return {logits.row<float>(row.logits_row),
          block_max_.data() + i * static_cast<size_t>(NumScanBlocks(vocab_.size())), vocab_};
}

void Sampler::WriteFirst(const MatrixView& logits, const SampleRow& row, size_t i) {
  RowState& state = states_[i];
  const LogitSlice slice = SliceOf(logits, row, i);
  float* block_max = block_max_.data() + i * static_cast<size_t>(NumScanBlocks(vocab_.size()));
  auto* x = logits.row<float>(row.logits_row);
  const bool wants_logprobs = row.num_logprobs >= 0;
  float max = 0;
  if (wants_logprobs) {
    max = ScanMax(x, vocab_.size(), block_max);
    WriteLogprobSummary(slice, max, row.num_logprobs, send_.data() + state.summary_offset);
  }
  if (row.adjuster != nullptr) {
    row.adjuster->Apply(row.position, x, wants_logprobs ? &state.raw : nullptr);
  }
  if (!wants_logprobs || row.adjuster != nullptr) max = ScanMax(x, vocab_.size(), block_max);
  const Candidate best = FindBest(row, i, slice, max);
  std::memcpy(send_.data() + kDigestBytes + static_cast<int64_t>(i) * kCandidateBytes, &best,
              sizeof(best));
  std::byte* out = send_.data() + state.filter_offset;
  if (state.kind == Kind::kCandidates) {
    WriteCandidates(row, i, slice, out);
  } else if (state.kind == Kind::kFilter && state.limits.needs_histogram() &&
             best.id != kBadLogits) {
    FillMassHistogram(slice,
                      {.scale = state.limits.scale, .top = MassStep(max, state.limits.scale)},
                      *reinterpret_cast<MassHistogram*>(out));
  }
}

// The rank's part in a row's first message: its largest logit, and where that decides, its best id.
Candidate Sampler::FindBest(const SampleRow& row, size_t i, const LogitSlice& slice,
                            float max) const {
  if (std::isnan(max)) return {.id = kBadLogits};
  Candidate best;
  best.logit = max;
  if (max == kMinusInfinity) return best;
  if (states_[i].kind == Kind::kGreedy) {
    const int64_t begin =
        std::find(slice.block_max, slice.block_max + NumScanBlocks(slice.size()), max) -
        slice.block_max;
    const int64_t index =
        std::find(slice.logits + begin * kScanBlock, slice.logits + slice.size(), max) -
        slice.logits;
    best.score = max;
    best.id = static_cast<int32_t>(vocab_.begin + index);
    best.raw = RawLogit(row, i, slice, best.id);
  } else if (states_[i].kind == Kind::kDraw) {
    best = RunRace(row, i, slice, {});
    best.logit = max;
  }
  return best;
}

float Sampler::RawLogit(const SampleRow& row, size_t i, const LogitSlice& slice, int32_t id) const {
  if (row.num_logprobs < 0) return 0;
  if (row.adjuster != nullptr) return row.adjuster->RawLogit(id, slice.logits, states_[i].raw);
  return slice.logits[id - vocab_.begin];
}

Candidate Sampler::MakeCandidate(const SampleRow& row, size_t i, const LogitSlice& slice,
                                 const LogitAndId& entry) const {
  return {
      .score = entry.logit * (1 / row.temperature) + GumbelNoise(row.seed, row.position, entry.id),
      .logit = entry.logit,
      .raw = RawLogit(row, i, slice, entry.id),
      .id = entry.id};
}

Candidate Sampler::RunRace(const SampleRow& row, size_t i, const LogitSlice& slice,
                           const Survivors& survivors) const {
  const RaceResult result =
      GumbelRace(slice, survivors, row.seed, row.position, 1 / row.temperature);
  if (result.id < 0) return {};
  return {.score = result.score,
          .logit = slice.logits[result.id - vocab_.begin],
          .raw = RawLogit(row, i, slice, result.id),
          .id = result.id};
}

// The k best of all ids are among the k best of each rank.
void Sampler::WriteCandidates(const SampleRow& row, size_t i, const LogitSlice& slice,
                              std::byte* out) const {
  LogitAndId entries[kMaxCandidates];
  const auto top_k = static_cast<size_t>(states_[i].limits.top_k);
  const int64_t count = SelectTop(slice, std::span(entries, top_k));
  auto* candidates = reinterpret_cast<Candidate*>(out);
  for (size_t j = 0; j < top_k; ++j) {
    candidates[j] =
        static_cast<int64_t>(j) < count ? MakeCandidate(row, i, slice, entries[j]) : Candidate{};
  }
}

const Candidate& Sampler::FirstBest(size_t rank, size_t i) const {
  return reinterpret_cast<const Candidate*>(FirstMessage(rank) + kDigestBytes)[i];
}

// Fails the row, finds its token, or leaves it to the filters.
void Sampler::ReadFirst(size_t i) {
  Candidate& winner = winners_[i];
  winner = {};
  float max = kMinusInfinity;
  for (size_t rank = 0; rank < num_ranks(); ++rank) {
    const Candidate& best = FirstBest(rank, i);
    if (best.id == kBadLogits) {
      winner = {};
      states_[i].kind = Kind::kGreedy;  // nothing more to do
      return;
    }
    max = std::max(max, best.logit);
    if (best.id >= 0 && (winner.id < 0 || BetterScore(best, winner))) winner = best;
  }
  if (max == kMinusInfinity) {
    states_[i].kind = Kind::kGreedy;
  } else if (states_[i].kind == Kind::kCandidates) {
    winner = PickFromCandidates(i, max);
  }
}

Candidate Sampler::PickFromCandidates(size_t i, float max) const {
  const FilterLimits& limits = states_[i].limits;
  const auto top_k = static_cast<size_t>(limits.top_k);
  const uint32_t floor = limits.min_p > 0 ? MinPKey(max, limits.scale, limits.min_p) : kLowestKey;
  thread_local std::vector<Candidate> merged;
  merged.clear();
  for (size_t rank = 0; rank < num_ranks(); ++rank) {
    const auto* candidates =
        reinterpret_cast<const Candidate*>(FirstMessage(rank) + states_[i].filter_offset);
    for (size_t j = 0; j < top_k && candidates[j].id >= 0; ++j) {
      if (OrderKey(candidates[j].logit) >= floor) merged.push_back(candidates[j]);
    }
  }
  std::sort(merged.begin(), merged.end(), BetterLogit);
  if (merged.size() > top_k) merged.resize(top_k);
  const MassBuckets buckets{.scale = limits.scale, .top = MassStep(max, limits.scale)};
  Mass total = 0;
  for (const Candidate& candidate : merged) {
    total += buckets.mass(candidate.logit);
  }
  const double wanted = limits.top_p * static_cast<double>(total);
  Candidate winner;
  Mass mass = 0;
  for (const Candidate& candidate : merged) {
    if (winner.id >= 0 && limits.top_p < 1 && static_cast<double>(mass) >= wanted) break;
    mass += buckets.mass(candidate.logit);
    if (winner.id < 0 || BetterScore(candidate, winner)) winner = candidate;
  }
  return winner;
}

void Sampler::StartFilters() {
  num_filters_ = 0;
  for (size_t i = 0; i < winners_.size(); ++i) {
    if (states_[i].kind != Kind::kFilter) continue;
    if (filters_.size() == num_filters_) filters_.emplace_back();
    filters_[num_filters_].row = i;
    filters_[num_filters_++].offsets.resize(num_ranks());
  }
  ForEach(num_filters_, [&](size_t f) { StartFilter(filters_[f]); });
}

void Sampler::StartFilter(FilteredRow& filtered) const {
  thread_local std::vector<float> maxima;
  thread_local std::vector<const MassHistogram*> histograms;
  maxima.resize(num_ranks());
  histograms.resize(num_ranks());
  for (size_t rank = 0; rank < num_ranks(); ++rank) {
    maxima[rank] = FirstBest(rank, filtered.row).logit;
    histograms[rank] = reinterpret_cast<const MassHistogram*>(FirstMessage(rank) +
                                                              states_[filtered.row].filter_offset);
  }
  filtered.filter.Start(states_[filtered.row].limits, maxima, histograms, communicator_.rank());
}

absl::Status Sampler::RunFilters(const MatrixView& logits, std::span<const SampleRow> rows) {
  while (num_filters_ > 0) {
    LOCKSTEP_RETURN_IF_ERROR(FilterRound(logits, rows));
    // Those that are done go behind the others.
    for (size_t f = 0; f < num_filters_;) {
      if (filters_[f].filter.done()) {
        winners_[filters_[f].row] = filters_[f].filter.winner();
        std::swap(filters_[f], filters_[--num_filters_]);
      } else {
        ++f;
      }
    }
  }
  return absl::OkStatus();
}

absl::Status Sampler::FilterRound(const MatrixView& logits, std::span<const SampleRow> rows) {
  int64_t total = 0;
  for (size_t rank = 0; rank < num_ranks(); ++rank) {
    rank_bytes_[rank] = 0;
    for (size_t f = 0; f < num_filters_; ++f) {
      filters_[f].offsets[rank] = rank_bytes_[rank];
      rank_bytes_[rank] += filters_[f].filter.MessageBytes(static_cast<int>(rank));
    }
    rank_begin_[rank] = total;
    total += rank_bytes_[rank];
  }
  send_.resize(static_cast<size_t>(rank_bytes_[static_cast<size_t>(communicator_.rank())]));
  receive_.resize(static_cast<size_t>(total));
  ForEach(num_filters_,
          [&](size_t f) { WriteFilterMessage(logits, rows[filters_[f].row], filters_[f]); });
  LOCKSTEP_RETURN_IF_ERROR(communicator_.AllGatherV(send_.data(), rank_bytes_, receive_.data()));
  ForEach(num_filters_, [&](size_t f) { ReadFilterMessages(filters_[f]); });
  return absl::OkStatus();
}

void Sampler::WriteFilterMessage(const MatrixView& logits, const SampleRow& row,
                                 const FilteredRow& filtered) {
  const size_t i = filtered.row;
  const LogitSlice slice = SliceOf(logits, row, i);
  filtered.filter.WriteMessage(
      slice, [&](const LogitAndId& entry) { return MakeCandidate(row, i, slice, entry); },
      [&](const Survivors& survivors) { return RunRace(row, i, slice, survivors); },
      send_.data() + filtered.offsets[static_cast<size_t>(communicator_.rank())]);
}

void Sampler::ReadFilterMessages(FilteredRow& filtered) const {
  thread_local std::vector<const std::byte*> messages;
  messages.resize(num_ranks());
  for (size_t rank = 0; rank < num_ranks(); ++rank) {
    messages[rank] = receive_.data() + rank_begin_[rank] + filtered.offsets[rank];
  }
  filtered.filter.ReadMessages(messages);
}

void Sampler::WriteOutput(std::span<const SampleRow> rows, SampleOutput& output) {
  bool wants_logprobs = false;
  for (size_t i = 0; i < rows.size(); ++i) {
    output.tokens[i] = winners_[i].id >= 0 ? winners_[i].id : kFailedToken;
    wants_logprobs |= rows[i].num_logprobs >= 0;
  }
  if (!wants_logprobs) {
    output.logprobs.clear();
    return;
  }
  output.logprobs.resize(rows.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    PositionLogprobs& result = output.logprobs[i];
    result.token = {output.tokens[i], std::numeric_limits<float>::quiet_NaN()};
    result.top.clear();
    if (rows[i].num_logprobs < 0 || winners_[i].id < 0) continue;
    ReadLogprobSummaries(FirstMessage(0) + states_[i].summary_offset, first_bytes_,
                         communicator_.size(), rows[i].num_logprobs, winners_[i].id,
                         winners_[i].raw, result);
  }
}

}  // namespace lockstep
