#include "runtime/cuda_sampler.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <utility>

#include "runtime/core/cuda_errors.h"
#include "runtime/cuda_filter.h"
#include "runtime/cuda_sampling.h"
#include "runtime/random_bits.h"
#include "runtime/softmax_mass.h"

namespace lockstep {

namespace {

template <typename T>
int64_t BytesOf(int64_t count) {
  return count * static_cast<int64_t>(sizeof(T));
}

// A step's best ids of rows of kCandidates, those of rows with log probabilities, and adjustments:
// what bounds the memory that only some rows need. 256 rows with the largest top_k fit.
constexpr int64_t kMaxListed = 1 << 16;
constexpr int64_t kMaxAdjustments = 1 << 20;

class CudaSamplerImpl : public CudaSampler {
 public:
  explicit CudaSamplerImpl(const CudaSamplerOptions& options)
      : options_(options), vocab_(options.vocab_ranges[static_cast<size_t>(options.rank)]) {}
  // What the kernels use must not go before them.
  ~CudaSamplerImpl() override { Synchronize(options_.stream).IgnoreError(); }

  absl::Status Allocate();

  bool Supports(std::span<const SampleRow> rows) const override;
  absl::Status Launch(const MatrixView& logits, std::span<const SampleRow> rows,
                      std::span<const int32_t> slots, uint64_t digest,
                      int32_t* last_tokens) override;
  absl::Status Wait(SampleOutput& output) override;
  absl::Status PutTokens(std::span<const int32_t> slots, std::span<const int32_t> tokens,
                         int32_t* last_tokens) override;

 private:
  // Log probabilities that a row wants.
  struct Wanted {
    int64_t row = 0;
    int32_t num_logprobs = 0;
    int32_t first_top = 0;
  };
  // Of a launch that waits for its Wait: what the device reads and writes of the host's memory.
  struct Flight {
    int64_t num_rows = 0;
    PinnedBuffer rows;         // as rows_
    PinnedBuffer adjustments;  // DeviceAdjustment [kMaxAdjustments]
    PinnedBuffer results;      // as results_
    PinnedBuffer summaries;    // [N] of the ranks, each LogitSum [rows], LogitAndId [tops]
    std::vector<Wanted> wanted;
    int64_t num_tops = 0;
    std::vector<int32_t> filtered;  // rows of kFilter
    OwnedCudaEvent done;
  };
  // What the rows of a step need.
  struct Needs {
    MessageTotals totals;
    int64_t num_adjustments = 0;  // of this rank
    int64_t num_cuts = 0;         // at most, of a row's filters
    bool draws = false;
    bool scans = false;  // a largest logit
  };

  int64_t num_ranks() const { return std::ssize(options_.vocab_ranges); }
  int64_t vocab_size() const { return options_.vocab_ranges.back().end; }
  int64_t TokensOffset() const { return BytesOf<uint64_t>(num_ranks()); }
  int64_t RawsOffset() const { return TokensOffset() + BytesOf<int32_t>(options_.max_rows); }
  int64_t SummaryBytes(const Flight& flight) const {
    return BytesOf<LogitSum>(std::ssize(flight.wanted)) + BytesOf<LogitAndId>(flight.num_tops);
  }
  Flight& FlightAt(uint64_t index) { return flights_[index % flights_.size()]; }
  DeviceRowKind KindOf(const SampleRow& row) const;
  absl::Status CreateFlights();
  Needs Fill(std::span<const SampleRow> rows, std::span<const int32_t> slots, Flight& flight) const;
  void FillAdjustments(const SampleRow& row, int64_t i, DeviceRow& device, Needs& needs,
                       Flight& flight) const;
  absl::Status LaunchRows(const MatrixView& logits, uint64_t digest, const Needs& needs,
                          int32_t* last_tokens, Flight& flight);
  absl::Status LaunchScans(const SamplingStep& step, const Needs& needs);
  absl::Status LaunchFilters(const SamplingStep& step, const SamplingResults& results,
                             const Needs& needs, const Flight& flight);
  absl::Status FilterChunk(const FilterStep& filter, const Needs& needs);
  absl::Status AllGather(void* all, int64_t bytes);
  absl::Status CopyResults(const MessageLayout& layout, Flight& flight);
  void ReadLogprobs(const Flight& flight, SampleOutput& output) const;

  const CudaSamplerOptions options_;
  const Range vocab_;  // this rank's
  int num_multiprocessors_ = 0;
  std::vector<Flight> flights_;  // [steps_in_flight]
  uint64_t num_launched_ = 0;
  uint64_t num_landed_ = 0;

  DeviceBuffer rows_;               // DeviceRow [rows], int32 [filtered rows]
  DeviceBuffer adjustments_;        // DeviceAdjustment [kMaxAdjustments]
  DeviceBuffer arrivals_;           // uint32 [max_rows]
  DeviceBuffer parts_;              // RowPart [rows, parts]
  DeviceBuffer selected_parts_;     // SelectedPart [max_rows, kSelectParts]
  DeviceBuffer selected_;           // uint64 [kMaxListed, kSelectParts]
  DeviceBuffer messages_;           // [N] of the ranks, MessageLayout
  DeviceBuffer filter_states_;      // FilterState [kMaxFilterRows]
  DeviceBuffer filter_histograms_;  // FilterHistogram [N, kMaxFilterRows]
  DeviceBuffer filter_candidates_;  // Candidate [N, kMaxFilterRows]
  DeviceBuffer results_;  // uint64 [N] digests, int32 [max_rows] tokens, float [max_rows] raw

  // Of tokens that the host has sampled: slots, then tokens. int32 [2, max_rows]
  PinnedBuffer host_tokens_;
  DeviceBuffer device_tokens_;
  OwnedCudaEvent host_tokens_copied_;
};

absl::Status CudaSamplerImpl::Allocate() {
  LOCKSTEP_CHECK(options_.max_rows >= 1 && options_.steps_in_flight >= 1);
  LOCKSTEP_CHECK((options_.nccl != nullptr) == (num_ranks() > 1));
  int device = 0;
  LOCKSTEP_CUDA(cudaGetDevice(&device));
  LOCKSTEP_CUDA(
      cudaDeviceGetAttribute(&num_multiprocessors_, cudaDevAttrMultiProcessorCount, device));
  const int64_t max_rows = options_.max_rows;
  int64_t max_parts = 0;
  for (int64_t rows = 1; rows <= max_rows; ++rows) {
    max_parts = std::max(max_parts, rows * NumParts(rows, vocab_.size(), num_multiprocessors_));
  }
  const MessageLayout layout =
      LayoutOf(max_rows, {.sums = max_rows, .tops = kMaxListed, .candidates = kMaxListed});
  const auto allocate = [](int64_t bytes, DeviceBuffer& buffer) -> absl::Status {
    LOCKSTEP_ASSIGN_OR_RETURN(buffer, DeviceBuffer::Create(bytes, "sampling"));
    return absl::OkStatus();
  };
  const int64_t filter_rows = std::min(max_rows, kMaxFilterRows);
  LOCKSTEP_RETURN_IF_ERROR(
      allocate(BytesOf<DeviceRow>(max_rows) + BytesOf<int32_t>(max_rows), rows_));
  LOCKSTEP_RETURN_IF_ERROR(allocate(BytesOf<FilterState>(filter_rows), filter_states_));
  LOCKSTEP_RETURN_IF_ERROR(
      allocate(BytesOf<FilterHistogram>(num_ranks() * filter_rows), filter_histograms_));
  LOCKSTEP_RETURN_IF_ERROR(
      allocate(BytesOf<Candidate>(num_ranks() * filter_rows), filter_candidates_));
  LOCKSTEP_RETURN_IF_ERROR(allocate(BytesOf<DeviceAdjustment>(kMaxAdjustments), adjustments_));
  LOCKSTEP_RETURN_IF_ERROR(allocate(BytesOf<uint32_t>(max_rows), arrivals_));
  LOCKSTEP_RETURN_IF_ERROR(allocate(BytesOf<RowPart>(max_parts), parts_));
  LOCKSTEP_RETURN_IF_ERROR(
      allocate(BytesOf<SelectedPart>(max_rows * kSelectParts), selected_parts_));
  LOCKSTEP_RETURN_IF_ERROR(allocate(BytesOf<uint64_t>(kMaxListed * kSelectParts), selected_));
  LOCKSTEP_RETURN_IF_ERROR(allocate(num_ranks() * layout.bytes, messages_));
  LOCKSTEP_RETURN_IF_ERROR(allocate(RawsOffset() + BytesOf<float>(max_rows), results_));
  LOCKSTEP_RETURN_IF_ERROR(allocate(BytesOf<int32_t>(2 * max_rows), device_tokens_));
  LOCKSTEP_ASSIGN_OR_RETURN(host_tokens_,
                            PinnedBuffer::Create(BytesOf<int32_t>(2 * max_rows), "sampling"));
  LOCKSTEP_ASSIGN_OR_RETURN(host_tokens_copied_, OwnedCudaEvent::Create());
  LOCKSTEP_RETURN_IF_ERROR(CreateFlights());
  LOCKSTEP_RETURN_IF_ERROR(
      FillBytesAsync(arrivals_.data(), 0, arrivals_.size_bytes(), options_.stream));
  return Synchronize(options_.stream);
}

absl::Status CudaSamplerImpl::CreateFlights() {
  const auto allocate = [](int64_t bytes, PinnedBuffer& buffer) -> absl::Status {
    LOCKSTEP_ASSIGN_OR_RETURN(buffer, PinnedBuffer::Create(bytes, "sampling"));
    return absl::OkStatus();
  };
  const int64_t max_rows = options_.max_rows;
  const int64_t max_summary_bytes = BytesOf<LogitSum>(max_rows) + BytesOf<LogitAndId>(kMaxListed);
  flights_.resize(static_cast<size_t>(options_.steps_in_flight));
  for (Flight& flight : flights_) {
    LOCKSTEP_RETURN_IF_ERROR(allocate(rows_.size_bytes(), flight.rows));
    LOCKSTEP_RETURN_IF_ERROR(
        allocate(BytesOf<DeviceAdjustment>(kMaxAdjustments), flight.adjustments));
    LOCKSTEP_RETURN_IF_ERROR(allocate(results_.size_bytes(), flight.results));
    LOCKSTEP_RETURN_IF_ERROR(allocate(num_ranks() * max_summary_bytes, flight.summaries));
    LOCKSTEP_ASSIGN_OR_RETURN(flight.done, OwnedCudaEvent::Create());
  }
  return absl::OkStatus();
}

// As Sampler::KindOf.
DeviceRowKind CudaSamplerImpl::KindOf(const SampleRow& row) const {
  if (row.greedy()) return DeviceRowKind::kGreedy;
  const int64_t top_k = row.top_k < vocab_size() ? row.top_k : 0;
  if (top_k > 0 && top_k <= kMaxCandidates) return DeviceRowKind::kCandidates;
  return top_k > 0 || row.top_p < 1 || row.min_p > 0 ? DeviceRowKind::kFilter
                                                     : DeviceRowKind::kDraw;
}

bool CudaSamplerImpl::Supports(std::span<const SampleRow> rows) const {
  MessageTotals totals;
  int64_t max_adjustments = 0;  // at least those of any rank
  for (const SampleRow& row : rows) {
    if (KindOf(row) == DeviceRowKind::kCandidates) totals.candidates += row.top_k;
    totals.tops += std::max(0, row.num_logprobs);
    if (row.adjuster != nullptr) max_adjustments += row.adjuster->MaxEntries(row.position);
  }
  return totals.tops <= kMaxListed && totals.candidates <= kMaxListed &&
         max_adjustments <= kMaxAdjustments;
}

absl::Status CudaSamplerImpl::Launch(const MatrixView& logits, std::span<const SampleRow> rows,
                                     std::span<const int32_t> slots, uint64_t digest,
                                     int32_t* last_tokens) {
  LOCKSTEP_CHECK(num_launched_ - num_landed_ < flights_.size());
  LOCKSTEP_CHECK(Supports(rows) && rows.size() == slots.size());
  LOCKSTEP_CHECK(std::ssize(rows) <= options_.max_rows);
  LOCKSTEP_CHECK(logits.dtype == DType::kF32 && logits.cols >= vocab_.size());
  Flight& flight = FlightAt(num_launched_++);
  flight.num_rows = std::ssize(rows);
  flight.wanted.clear();
  flight.filtered.clear();
  if (!rows.empty()) {
    const Needs needs = Fill(rows, slots, flight);
    LOCKSTEP_RETURN_IF_ERROR(LaunchRows(logits, digest, needs, last_tokens, flight));
  }
  return flight.done.Record(options_.stream);
}

CudaSamplerImpl::Needs CudaSamplerImpl::Fill(std::span<const SampleRow> rows,
                                             std::span<const int32_t> slots, Flight& flight) const {
  Needs needs;
  MessageTotals& totals = needs.totals;
  for (size_t i = 0; i < rows.size(); ++i) {
    const SampleRow& row = rows[i];
    DeviceRow device;
    device.kind = KindOf(row);
    device.logits_row = row.logits_row;
    device.slot = slots[i];
    if (!row.greedy()) {
      device.row_key = RowKey(row.seed, row.position);
      device.inverse_temperature = 1 / row.temperature;
      device.scale = MassScale(row.temperature);
      device.top_p = row.top_p;
      device.min_p = row.min_p;
    }
    if (device.kind == DeviceRowKind::kCandidates) {
      device.top_k = static_cast<int32_t>(row.top_k);
      device.first_candidate = static_cast<int32_t>(totals.candidates);
      totals.candidates += row.top_k;
    }
    if (device.kind == DeviceRowKind::kFilter) {
      device.top_k = row.top_k < vocab_size() ? static_cast<int32_t>(row.top_k) : 0;
      const int64_t cuts = (device.top_k > 0 ? 1 : 0) + (row.top_p < 1 ? 1 : 0);
      needs.num_cuts = std::max(needs.num_cuts, cuts);
      flight.filtered.push_back(static_cast<int32_t>(i));
    }
    needs.draws |= device.kind == DeviceRowKind::kDraw;
    needs.scans |= device.kind == DeviceRowKind::kGreedy || device.kind == DeviceRowKind::kFilter;
    device.num_logprobs = row.num_logprobs;
    if (row.num_logprobs >= 0) {
      device.sum_index = static_cast<int32_t>(totals.sums++);
      device.first_top = static_cast<int32_t>(totals.tops);
      totals.tops += row.num_logprobs;
      flight.wanted.push_back({static_cast<int64_t>(i), row.num_logprobs, device.first_top});
    }
    if (row.adjuster != nullptr) {
      FillAdjustments(row, static_cast<int64_t>(i), device, needs, flight);
    }
    flight.rows.as<DeviceRow>()[i] = device;
  }
  flight.num_tops = totals.tops;
  std::copy(flight.filtered.begin(), flight.filtered.end(),
            reinterpret_cast<int32_t*>(flight.rows.as<DeviceRow>() + rows.size()));
  return needs;
}

void CudaSamplerImpl::FillAdjustments(const SampleRow& row, int64_t i, DeviceRow& device,
                                      Needs& needs, Flight& flight) const {
  const std::span<const LogitAdjuster::Entry> entries = row.adjuster->entries();
  LOCKSTEP_CHECK(needs.num_adjustments + std::ssize(entries) <= kMaxAdjustments);
  const bool bans = row.adjuster->bans(row.position);
  device.penalties = row.adjuster->penalties();
  device.first_adjustment = static_cast<int32_t>(needs.num_adjustments);
  device.num_adjustments = static_cast<int32_t>(entries.size());
  auto* out = flight.adjustments.as<DeviceAdjustment>() + needs.num_adjustments;
  for (const LogitAdjuster::Entry& entry : entries) {
    DeviceAdjustment adjustment;
    adjustment.bias = entry.bias;
    adjustment.column = entry.index;
    adjustment.generated = entry.generated;
    adjustment.row = static_cast<int32_t>(i);
    adjustment.banned = bans && entry.banned ? 1 : 0;
    adjustment.in_prompt = entry.in_prompt ? 1 : 0;
    *out++ = adjustment;
  }
  needs.num_adjustments += std::ssize(entries);
}

absl::Status CudaSamplerImpl::LaunchRows(const MatrixView& logits, uint64_t digest,
                                         const Needs& needs, int32_t* last_tokens, Flight& flight) {
  const int64_t num_rows = flight.num_rows;
  const MessageLayout layout = LayoutOf(num_rows, needs.totals);
  LOCKSTEP_RETURN_IF_ERROR(
      CopyAsync(rows_.data(), flight.rows.data(),
                BytesOf<DeviceRow>(num_rows) + BytesOf<int32_t>(std::ssize(flight.filtered)),
                options_.stream));
  LOCKSTEP_RETURN_IF_ERROR(CopyAsync(adjustments_.data(), flight.adjustments.data(),
                                     BytesOf<DeviceAdjustment>(needs.num_adjustments),
                                     options_.stream));
  std::byte* const messages = messages_.as<std::byte>();
  SamplingStep step;
  step.logits = static_cast<float*>(logits.data);
  step.stride = logits.stride;
  step.vocab = vocab_;
  step.digest = digest;
  step.rows = rows_.as<DeviceRow>();
  step.num_rows = num_rows;
  step.adjustments = adjustments_.as<DeviceAdjustment>();
  step.num_adjustments = needs.num_adjustments;
  step.message = messages + options_.rank * layout.bytes;
  step.layout = layout;
  step.arrivals = arrivals_.as<uint32_t>();
  step.num_parts = NumParts(num_rows, vocab_.size(), num_multiprocessors_);
  step.parts = parts_.as<RowPart>();
  step.selected_parts = selected_parts_.as<SelectedPart>();
  step.selected = selected_.as<uint64_t>();
  LOCKSTEP_RETURN_IF_ERROR(LaunchScans(step, needs));
  LOCKSTEP_RETURN_IF_ERROR(AllGather(messages, layout.bytes));
  SamplingResults results;
  results.rows = step.rows;
  results.num_rows = num_rows;
  results.has_candidates = needs.totals.candidates > 0;
  results.messages = messages;
  results.layout = layout;
  results.num_ranks = num_ranks();
  results.digests = results_.as<uint64_t>();
  results.tokens = reinterpret_cast<int32_t*>(results_.as<std::byte>() + TokensOffset());
  results.raws = reinterpret_cast<float*>(results_.as<std::byte>() + RawsOffset());
  results.last_tokens = last_tokens;
  LOCKSTEP_RETURN_IF_ERROR(PickTokens(results, options_.stream));
  LOCKSTEP_RETURN_IF_ERROR(LaunchFilters(step, results, needs, flight));
  return CopyResults(layout, flight);
}

// Every rank's `bytes` bytes, which stand in their place in `all` already.
absl::Status CudaSamplerImpl::AllGather(void* all, int64_t bytes) {
  if (options_.nccl == nullptr) return absl::OkStatus();
  return options_.nccl->AllGather(static_cast<std::byte*>(all) + options_.rank * bytes, bytes, all,
                                  options_.stream);
}

absl::Status CudaSamplerImpl::LaunchFilters(const SamplingStep& step,
                                            const SamplingResults& results, const Needs& needs,
                                            const Flight& flight) {
  FilterStep filter;
  filter.step = step;
  filter.results = results;
  filter.rank = options_.rank;
  filter.states = filter_states_.as<FilterState>();
  filter.histograms = filter_histograms_.as<FilterHistogram>();
  filter.candidates = filter_candidates_.as<Candidate>();
  const int64_t num_filtered = std::ssize(flight.filtered);
  for (int64_t begin = 0; begin < num_filtered; begin += kMaxFilterRows) {
    filter.rows = reinterpret_cast<const int32_t*>(step.rows + step.num_rows) + begin;
    filter.num_rows = std::min(num_filtered - begin, kMaxFilterRows);
    filter.num_parts = NumParts(filter.num_rows, vocab_.size(), num_multiprocessors_);
    LOCKSTEP_RETURN_IF_ERROR(FilterChunk(filter, needs));
  }
  return absl::OkStatus();
}

absl::Status CudaSamplerImpl::FilterChunk(const FilterStep& filter, const Needs& needs) {
  LOCKSTEP_RETURN_IF_ERROR(StartFilters(filter, options_.stream));
  const int64_t rounds = needs.num_cuts > 0 ? 1 + kCutRounds * needs.num_cuts : 0;
  for (int64_t round = 0; round < rounds; ++round) {
    LOCKSTEP_RETURN_IF_ERROR(CountFilters(filter, options_.stream));
    LOCKSTEP_RETURN_IF_ERROR(
        AllGather(filter.histograms, BytesOf<FilterHistogram>(filter.num_rows)));
    LOCKSTEP_RETURN_IF_ERROR(NarrowFilters(filter, options_.stream));
  }
  LOCKSTEP_RETURN_IF_ERROR(RaceFilters(filter, options_.stream));
  LOCKSTEP_RETURN_IF_ERROR(AllGather(filter.candidates, BytesOf<Candidate>(filter.num_rows)));
  return PickFiltered(filter, options_.stream);
}

absl::Status CudaSamplerImpl::LaunchScans(const SamplingStep& step, const Needs& needs) {
  if (needs.totals.sums > 0) LOCKSTEP_RETURN_IF_ERROR(SummariseLogits(step, options_.stream));
  if (needs.num_adjustments > 0) LOCKSTEP_RETURN_IF_ERROR(AdjustLogits(step, options_.stream));
  if (needs.scans) LOCKSTEP_RETURN_IF_ERROR(ScanRows(step, /*race=*/false, options_.stream));
  if (needs.draws) LOCKSTEP_RETURN_IF_ERROR(ScanRows(step, /*race=*/true, options_.stream));
  if (needs.totals.candidates == 0) return absl::OkStatus();
  return SelectCandidates(step, options_.stream);
}

absl::Status CudaSamplerImpl::CopyResults(const MessageLayout& layout, Flight& flight) {
  // With raw logits where they are wanted.
  const int64_t bytes = flight.wanted.empty() ? TokensOffset() + BytesOf<int32_t>(flight.num_rows)
                                              : RawsOffset() + BytesOf<float>(flight.num_rows);
  LOCKSTEP_RETURN_IF_ERROR(
      CopyAsync(flight.results.data(), results_.data(), bytes, options_.stream));
  const int64_t summary_bytes = SummaryBytes(flight);
  for (int64_t rank = 0; rank < num_ranks(); ++rank) {
    LOCKSTEP_RETURN_IF_ERROR(
        CopyAsync(flight.summaries.as<std::byte>() + rank * summary_bytes,
                  messages_.as<std::byte>() + rank * layout.bytes + layout.sums, summary_bytes,
                  options_.stream));
  }
  return absl::OkStatus();
}

absl::Status CudaSamplerImpl::Wait(SampleOutput& output) {
  LOCKSTEP_CHECK(num_landed_ < num_launched_);
  Flight& flight = FlightAt(num_landed_++);
  LOCKSTEP_RETURN_IF_ERROR(flight.done.Wait(options_.stopped));
  output.logprobs.clear();
  output.digests.clear();
  output.tokens.clear();
  if (flight.num_rows == 0) return absl::OkStatus();
  const auto* const digests = flight.results.as<const uint64_t>();
  output.digests.assign(digests, digests + num_ranks());
  const auto* const tokens =
      reinterpret_cast<const int32_t*>(flight.results.as<std::byte>() + TokensOffset());
  output.tokens.assign(tokens, tokens + flight.num_rows);
  if (!flight.wanted.empty()) ReadLogprobs(flight, output);
  return absl::OkStatus();
}

// The ranks' sums are added in rank order, on every rank alike.
void CudaSamplerImpl::ReadLogprobs(const Flight& flight, SampleOutput& output) const {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  output.logprobs.resize(output.tokens.size());
  for (size_t i = 0; i < output.tokens.size(); ++i) {
    output.logprobs[i].token = {output.tokens[i], kNan};
    output.logprobs[i].top.clear();
  }
  const auto* const raws =
      reinterpret_cast<const float*>(flight.results.as<std::byte>() + RawsOffset());
  const int64_t rank_bytes = SummaryBytes(flight);
  std::vector<LogitAndId> merged;
  for (size_t w = 0; w < flight.wanted.size(); ++w) {
    const Wanted& wanted = flight.wanted[w];
    const int32_t token = output.tokens[static_cast<size_t>(wanted.row)];
    if (token < 0) continue;
    float max = kMinusInfinity;
    merged.clear();
    const auto sums_of = [&](int64_t rank) {
      return reinterpret_cast<const LogitSum*>(flight.summaries.as<std::byte>() +
                                               rank * rank_bytes);
    };
    for (int64_t rank = 0; rank < num_ranks(); ++rank) {
      max = std::max(max, sums_of(rank)[w].max);
      const auto* const tops =
          reinterpret_cast<const LogitAndId*>(sums_of(rank) + flight.wanted.size()) +
          wanted.first_top;
      std::copy_if(tops, tops + wanted.num_logprobs, std::back_inserter(merged),
                   [](const LogitAndId& entry) { return entry.id >= 0; });
    }
    double total = 0;
    for (int64_t rank = 0; rank < num_ranks(); ++rank) {
      const LogitSum& part = sums_of(rank)[w];
      if (part.max > kMinusInfinity) {
        total += part.sum * std::exp(static_cast<double>(part.max) - max);
      }
    }
    FillLogprobs(max, std::log(total), merged, wanted.num_logprobs, token, raws[wanted.row],
                 output.logprobs[static_cast<size_t>(wanted.row)]);
  }
}

absl::Status CudaSamplerImpl::PutTokens(std::span<const int32_t> slots,
                                        std::span<const int32_t> tokens, int32_t* last_tokens) {
  LOCKSTEP_CHECK(slots.size() == tokens.size() && std::ssize(slots) <= options_.max_rows);
  LOCKSTEP_RETURN_IF_ERROR(host_tokens_copied_.Wait());
  const int64_t count = std::ssize(slots);
  auto* const host = host_tokens_.as<int32_t>();
  std::copy(slots.begin(), slots.end(), host);
  std::copy(tokens.begin(), tokens.end(), host + count);
  const auto* const device = device_tokens_.as<const int32_t>();
  LOCKSTEP_RETURN_IF_ERROR(
      CopyAsync(device_tokens_.data(), host, BytesOf<int32_t>(2 * count), options_.stream));
  LOCKSTEP_RETURN_IF_ERROR(host_tokens_copied_.Record(options_.stream));
  return StoreTokens(device, device + count, count, last_tokens, options_.stream);
}

}  // namespace

absl::StatusOr<std::unique_ptr<CudaSampler>> CudaSampler::Create(
    const CudaSamplerOptions& options) {
  auto sampler = std::make_unique<CudaSamplerImpl>(options);
  LOCKSTEP_RETURN_IF_ERROR(sampler->Allocate());
  return std::unique_ptr<CudaSampler>(std::move(sampler));
}

}  // namespace lockstep
