#include "model/cuda_inputs.h"

#include <algorithm>

#include "model/cuda_tables.h"

namespace lockstep {

namespace {
constexpr int64_t kAlignment = 256;

template <typename T>
void CopyPadded(std::span<const T> from, int64_t size, T padding, T* to) {
  std::copy(from.begin(), from.end(), to);
  std::fill(to + from.size(), to + size, padding);
}
}  // namespace

CudaInputs::Place CudaInputs::Add(int64_t bytes) {
  const Place place{size_bytes_, bytes};
  size_bytes_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
  return place;
}

absl::StatusOr<CudaInputs> CudaInputs::Create(const CudaInputLimits& limits, CudaStream stream) {
  CudaInputs inputs;
  inputs.limits_ = limits;
  inputs.token_ids_ = inputs.Add(limits.max_tokens * 4);
  inputs.positions_ = inputs.Add(limits.max_tokens * 4);
  inputs.slot_mapping_ = inputs.Add(limits.max_tokens * 8);
  inputs.query_start_loc_ = inputs.Add((limits.max_requests + 1) * 4);
  inputs.seq_lens_ = inputs.Add(limits.max_requests * 4);
  inputs.table_rows_ = inputs.Add(limits.max_requests * 4);
  inputs.logits_rows_ = inputs.Add(limits.max_logits_rows * 4);
  inputs.cos_ = inputs.Add(limits.max_tokens * limits.rotary_dim / 2 * 4);
  inputs.sin_ = inputs.Add(limits.max_tokens * limits.rotary_dim / 2 * 4);
  inputs.table_runs_ = inputs.Add(limits.num_slots * static_cast<int64_t>(sizeof(BlockTableRun)));
  inputs.table_blocks_ = inputs.Add(limits.num_slots * limits.max_blocks * 4);
  for (Staging& staging : inputs.staging_) {
    LOCKSTEP_ASSIGN_OR_RETURN(staging.memory,
                              PinnedBuffer::Create(inputs.size_bytes_, "arrays of a step"));
    LOCKSTEP_ASSIGN_OR_RETURN(staging.copied, OwnedCudaEvent::Create());
  }
  LOCKSTEP_ASSIGN_OR_RETURN(inputs.last_tokens_,
                            DeviceBuffer::Create(limits.num_slots * 4, "last tokens"));
  LOCKSTEP_RETURN_IF_ERROR(
      FillBytesAsync(inputs.last_tokens_.data(), 0, limits.num_slots * 4, stream));
  LOCKSTEP_ASSIGN_OR_RETURN(inputs.arrays_,
                            DeviceBuffer::Create(inputs.size_bytes_, "arrays of a step"));
  const int64_t table_bytes = (limits.num_slots + 1) * limits.max_blocks * 4;
  LOCKSTEP_ASSIGN_OR_RETURN(inputs.block_tables_,
                            DeviceBuffer::Create(table_bytes, "block tables"));
  LOCKSTEP_RETURN_IF_ERROR(FillBytesAsync(inputs.block_tables_.data(), 0, table_bytes, stream));
  return inputs;
}

absl::Status CudaInputs::Send(const Place& place, int64_t bytes, CudaStream stream) {
  LOCKSTEP_CHECK(bytes <= place.bytes);
  return CopyAsync(arrays_.as<char>() + place.offset, host<char>(place), bytes, stream);
}

absl::Status CudaInputs::BeginStep() {
  current_ = (current_ + 1) % kStagingBuffers;
  return staging_[current_].copied.Wait();
}

absl::Status CudaInputs::Upload(const ForwardBatch& batch, int64_t num_requests, int64_t num_tokens,
                                int64_t num_logits_rows, CudaStream stream) {
  const AttentionBatch& attention = batch.attention;
  LOCKSTEP_CHECK(num_tokens >= batch.num_tokens() && num_tokens <= limits_.max_tokens);
  LOCKSTEP_CHECK(num_requests >= attention.num_requests() && num_requests <= limits_.max_requests);
  LOCKSTEP_CHECK(num_logits_rows >= std::ssize(batch.logits_rows) &&
                 num_logits_rows <= limits_.max_logits_rows);
  CopyPadded(batch.token_ids, num_tokens, 0, host<int32_t>(token_ids_));
  CopyPadded(batch.positions, num_tokens, 0, host<int32_t>(positions_));
  CopyPadded(attention.slot_mapping, num_tokens, kNoSlot, host<int64_t>(slot_mapping_));
  CopyPadded(attention.seq_lens, num_requests, 0, host<int32_t>(seq_lens_));
  CopyPadded(batch.logits_rows, num_logits_rows, 0, host<int32_t>(logits_rows_));
  // A padding request has one padding row, while there are any.
  int32_t* const starts = host<int32_t>(query_start_loc_);
  std::copy(attention.query_start_loc.begin(), attention.query_start_loc.end(), starts);
  for (int64_t b = attention.num_requests(); b < num_requests; ++b) {
    starts[b + 1] = std::min<int32_t>(starts[b] + 1, static_cast<int32_t>(num_tokens));
  }
  int32_t* const rows = host<int32_t>(table_rows_);
  for (int64_t b = 0; b < num_requests; ++b) {
    const bool real = b < attention.num_requests();
    rows[b] = !real                          ? static_cast<int32_t>(limits_.num_slots)
              : attention.table_rows.empty() ? static_cast<int32_t>(b)
                                             : attention.table_rows[b];
  }
  const auto words = [this](const Place& place, int64_t num_words) -> StepArray {
    LOCKSTEP_CHECK(num_words * 4 <= place.bytes);
    return {host<int32_t>(place), device<int32_t>(place), num_words};
  };
  const StepArray arrays[kNumStepArrays] = {
      words(token_ids_, num_tokens),        words(positions_, num_tokens),
      words(slot_mapping_, 2 * num_tokens), words(query_start_loc_, num_requests + 1),
      words(seq_lens_, num_requests),       words(table_rows_, num_requests),
      words(logits_rows_, num_logits_rows)};
  LOCKSTEP_RETURN_IF_ERROR(PutStepArrays(arrays, last_tokens(), stream));
  if (limits_.rotary_dim > 0) {
    const int64_t angle_bytes = batch.num_tokens() * limits_.rotary_dim / 2 * 4;
    LOCKSTEP_RETURN_IF_ERROR(Send(cos_, angle_bytes, stream));
    LOCKSTEP_RETURN_IF_ERROR(Send(sin_, angle_bytes, stream));
  }
  LOCKSTEP_RETURN_IF_ERROR(UploadTables(batch, stream));
  return staging_[current_].copied.Record(stream);
}

absl::Status CudaInputs::UploadTables(const ForwardBatch& batch, CudaStream stream) {
  if (!batch.table_changes.has_value()) {  // nobody says what is new
    const int64_t entries = std::ssize(batch.attention.block_tables);
    LOCKSTEP_CHECK(batch.attention.max_blocks <= limits_.max_blocks);
    const int64_t tables =
        batch.attention.max_blocks == 0 ? 0 : entries / batch.attention.max_blocks;
    LOCKSTEP_CHECK(tables <= limits_.num_slots);
    int32_t* const staged = host<int32_t>(table_blocks_);
    for (int64_t i = 0; i < tables; ++i) {
      std::copy_n(batch.attention.block_tables.data() + i * batch.attention.max_blocks,
                  batch.attention.max_blocks, staged + i * limits_.max_blocks);
    }
    return CopyAsync(block_tables_.data(), staged, tables * limits_.max_blocks * 4, stream);
  }
  const auto& [runs, blocks] = *batch.table_changes;
  if (runs.empty()) return absl::OkStatus();
  std::copy(runs.begin(), runs.end(), host<BlockTableRun>(table_runs_));
  std::copy(blocks.begin(), blocks.end(), host<int32_t>(table_blocks_));
  LOCKSTEP_RETURN_IF_ERROR(
      Send(table_runs_, std::ssize(runs) * static_cast<int64_t>(sizeof(BlockTableRun)), stream));
  LOCKSTEP_RETURN_IF_ERROR(Send(table_blocks_, std::ssize(blocks) * 4, stream));
  return ApplyTableRuns(device<BlockTableRun>(table_runs_), std::ssize(runs),
                        device<int32_t>(table_blocks_), block_tables_.as<int32_t>(),
                        limits_.max_blocks, stream);
}

CudaAttentionBatch CudaInputs::attention(int64_t num_requests, int64_t num_tokens,
                                         int64_t block_size) const {
  CudaAttentionBatch batch;
  batch.query_start_loc = device<int32_t>(query_start_loc_);
  batch.seq_lens = device<int32_t>(seq_lens_);
  batch.block_tables = block_tables_.as<int32_t>();
  batch.table_rows = device<int32_t>(table_rows_);
  batch.slot_mapping = device<int64_t>(slot_mapping_);
  batch.max_blocks = limits_.max_blocks;
  batch.block_size = block_size;
  batch.num_requests = num_requests;
  batch.num_tokens = num_tokens;
  return batch;
}

}  // namespace lockstep
