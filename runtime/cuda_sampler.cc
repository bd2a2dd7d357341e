#include "runtime/cuda_sampler.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "runtime/core/cuda_errors.h"
#include "runtime/cuda_sampling.h"
#include "runtime/random_bits.h"

namespace lockstep {

namespace {

constexpr int64_t kAlignment = 256;

int64_t Aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

template <typename T>
int64_t BytesOf(int64_t count) {
  return count * static_cast<int64_t>(sizeof(T));
}

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
  // Of a launch that waits for its Wait: what the device reads and writes of the host's memory.
  struct Flight {
    int64_t num_rows = 0;
    PinnedBuffer rows;     // DeviceRow [max_rows]
    PinnedBuffer results;  // as results_
    OwnedCudaEvent done;
  };

  int64_t num_ranks() const { return std::ssize(options_.vocab_ranges); }
  int64_t TokensOffset() const { return BytesOf<uint64_t>(num_ranks()); }
  Flight& FlightAt(uint64_t index) { return flights_[index % flights_.size()]; }
  void FillRows(std::span<const SampleRow> rows, std::span<const int32_t> slots, DeviceRow* out);
  absl::Status LaunchRows(const MatrixView& logits, uint64_t digest, int32_t* last_tokens,
                          Flight& flight);

  const CudaSamplerOptions options_;
  const Range vocab_;  // this rank's
  int num_multiprocessors_ = 0;
  std::vector<Flight> flights_;  // [steps_in_flight]
  uint64_t num_launched_ = 0;
  uint64_t num_landed_ = 0;

  DeviceBuffer rows_;      // DeviceRow [max_rows]
  DeviceBuffer parts_;     // RowPart [rows, parts]
  DeviceBuffer arrivals_;  // uint32 [max_rows]
  DeviceBuffer messages_;  // [N] of the ranks, each MessageHeader, Candidate [rows]
  DeviceBuffer results_;   // uint64 [N] digests, int32 [max_rows] tokens

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
  const std::string what = "sampling";
  int64_t max_parts = 0;
  for (int64_t rows = 1; rows <= max_rows; ++rows) {
    max_parts = std::max(max_parts, rows * NumParts(rows, vocab_.size(), num_multiprocessors_));
  }
  const int64_t message_bytes = Aligned(BytesOf<MessageHeader>(1) + BytesOf<Candidate>(max_rows));
  const int64_t result_bytes = TokensOffset() + BytesOf<int32_t>(max_rows);
  LOCKSTEP_ASSIGN_OR_RETURN(rows_, DeviceBuffer::Create(BytesOf<DeviceRow>(max_rows), what));
  LOCKSTEP_ASSIGN_OR_RETURN(parts_, DeviceBuffer::Create(BytesOf<RowPart>(max_parts), what));
  LOCKSTEP_ASSIGN_OR_RETURN(arrivals_, DeviceBuffer::Create(BytesOf<uint32_t>(max_rows), what));
  LOCKSTEP_ASSIGN_OR_RETURN(messages_, DeviceBuffer::Create(num_ranks() * message_bytes, what));
  LOCKSTEP_ASSIGN_OR_RETURN(results_, DeviceBuffer::Create(result_bytes, what));
  LOCKSTEP_ASSIGN_OR_RETURN(device_tokens_,
                            DeviceBuffer::Create(BytesOf<int32_t>(2 * max_rows), what));
  LOCKSTEP_ASSIGN_OR_RETURN(host_tokens_,
                            PinnedBuffer::Create(BytesOf<int32_t>(2 * max_rows), what));
  LOCKSTEP_ASSIGN_OR_RETURN(host_tokens_copied_, OwnedCudaEvent::Create());
  flights_.resize(static_cast<size_t>(options_.steps_in_flight));
  for (Flight& flight : flights_) {
    LOCKSTEP_ASSIGN_OR_RETURN(flight.rows,
                              PinnedBuffer::Create(BytesOf<DeviceRow>(max_rows), what));
    LOCKSTEP_ASSIGN_OR_RETURN(flight.results, PinnedBuffer::Create(result_bytes, what));
    LOCKSTEP_ASSIGN_OR_RETURN(flight.done, OwnedCudaEvent::Create());
  }
  LOCKSTEP_RETURN_IF_ERROR(
      FillBytesAsync(arrivals_.data(), 0, arrivals_.size_bytes(), options_.stream));
  return Synchronize(options_.stream);
}

bool CudaSamplerImpl::Supports(std::span<const SampleRow> rows) const {
  return std::none_of(rows.begin(), rows.end(), [](const SampleRow& row) {
    return row.filtered() || row.adjuster != nullptr || row.num_logprobs >= 0;
  });
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
  if (!rows.empty()) {
    FillRows(rows, slots, flight.rows.as<DeviceRow>());
    LOCKSTEP_RETURN_IF_ERROR(LaunchRows(logits, digest, last_tokens, flight));
  }
  return flight.done.Record(options_.stream);
}

void CudaSamplerImpl::FillRows(std::span<const SampleRow> rows, std::span<const int32_t> slots,
                               DeviceRow* out) {
  for (size_t i = 0; i < rows.size(); ++i) {
    const SampleRow& row = rows[i];
    DeviceRow device;
    device.logits_row = row.logits_row;
    device.slot = slots[i];
    if (!row.greedy()) {
      device.kind = DeviceRowKind::kDraw;
      device.row_key = RowKey(row.seed, row.position);
      device.inverse_temperature = 1 / row.temperature;
    }
    out[i] = device;
  }
}

absl::Status CudaSamplerImpl::LaunchRows(const MatrixView& logits, uint64_t digest,
                                         int32_t* last_tokens, Flight& flight) {
  const int64_t num_rows = flight.num_rows;
  const int64_t message_bytes = BytesOf<MessageHeader>(1) + BytesOf<Candidate>(num_rows);
  LOCKSTEP_RETURN_IF_ERROR(
      CopyAsync(rows_.data(), flight.rows.data(), BytesOf<DeviceRow>(num_rows), options_.stream));
  std::byte* const messages = messages_.as<std::byte>();
  SamplingStep step;
  step.logits = static_cast<const float*>(logits.data);
  step.stride = logits.stride;
  step.vocab = vocab_;
  step.digest = digest;
  step.rows = rows_.as<DeviceRow>();
  step.num_rows = num_rows;
  step.num_parts = NumParts(num_rows, vocab_.size(), num_multiprocessors_);
  step.parts = parts_.as<RowPart>();
  step.arrivals = arrivals_.as<uint32_t>();
  step.message = messages + options_.rank * message_bytes;
  LOCKSTEP_RETURN_IF_ERROR(ScanRows(step, options_.stream));
  if (options_.nccl != nullptr) {
    LOCKSTEP_RETURN_IF_ERROR(
        options_.nccl->AllGather(step.message, message_bytes, messages, options_.stream));
  }
  SamplingResults results;
  results.rows = step.rows;
  results.num_rows = num_rows;
  results.messages = messages;
  results.message_bytes = message_bytes;
  results.num_ranks = num_ranks();
  results.digests = results_.as<uint64_t>();
  results.tokens = reinterpret_cast<int32_t*>(results_.as<std::byte>() + TokensOffset());
  results.last_tokens = last_tokens;
  LOCKSTEP_RETURN_IF_ERROR(PickTokens(results, options_.stream));
  return CopyAsync(flight.results.data(), results_.data(),
                   TokensOffset() + BytesOf<int32_t>(num_rows), options_.stream);
}

absl::Status CudaSamplerImpl::Wait(SampleOutput& output) {
  LOCKSTEP_CHECK(num_landed_ < num_launched_);
  Flight& flight = FlightAt(num_landed_++);
  LOCKSTEP_RETURN_IF_ERROR(flight.done.Wait());
  output.logprobs.clear();
  output.digests.clear();
  output.tokens.clear();
  if (flight.num_rows == 0) return absl::OkStatus();
  const auto* const digests = flight.results.as<const uint64_t>();
  output.digests.assign(digests, digests + num_ranks());
  const auto* const tokens =
      reinterpret_cast<const int32_t*>(flight.results.as<std::byte>() + TokensOffset());
  output.tokens.assign(tokens, tokens + flight.num_rows);
  return absl::OkStatus();
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
