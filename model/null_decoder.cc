#include "model/null_decoder.h"

#include <chrono>
#include <cstring>
#include <thread>

namespace lockstep {

namespace {

using Clock = std::chrono::steady_clock;

class NullDecoder : public Decoder {
 public:
  explicit NullDecoder(const NullDecoderOptions& options) : options_(options) {}

  absl::Status Forward(const ForwardBatch& batch, const KvPool& pool,
                       const MatrixView& logits) override;
  const AttentionGeometry& Geometry(int64_t) const override { return geometry_; }
  int64_t weight_bytes() const override { return 0; }

 private:
  void KeepPace();
  void WriteDigests(const ForwardBatch& batch, const KvCacheView& cache);

  const NullDecoderOptions options_;
  const AttentionGeometry geometry_;
  Clock::time_point next_step_;
  std::vector<uint64_t> digests_;  // [T]
};

char* DigestAt(const KvCacheView& cache, int64_t slot) {
  const int64_t element = cache.Offset(slot / cache.block_size, 0, slot % cache.block_size);
  return static_cast<char*>(cache.keys) + element * SizeOf(cache.dtype);
}

absl::Status NullDecoder::Forward(const ForwardBatch& batch, const KvPool& pool,
                                  const MatrixView& logits) {
  KeepPace();
  WriteDigests(batch, pool.Layer(0));
  for (int64_t r = 0; r < logits.rows; ++r) {
    float* const row = logits.row<float>(r);
    std::fill_n(row, logits.cols, 0.0f);
    const uint64_t digest = digests_[static_cast<size_t>(batch.logits_rows[r])];
    const int32_t next = NullToken(digest, options_.vocab_size, options_.end_token_ids);
    if (next >= options_.vocab.begin && next < options_.vocab.end) {
      row[next - options_.vocab.begin] = kNullLogit;
    }
  }
  return absl::OkStatus();
}

// Sleeps until the next step is due. On every rank, so that none waits for another awake.
void NullDecoder::KeepPace() {
  if (options_.step_seconds <= 0) return;
  constexpr std::chrono::milliseconds kMarkEvery(200);
  while (next_step_ - Clock::now() > kMarkEvery) {
    std::this_thread::sleep_for(kMarkEvery);
    if (options_.mark) options_.mark();
  }
  std::this_thread::sleep_until(next_step_);
  const auto pace = std::chrono::duration_cast<Clock::duration>(
      std::chrono::duration<double>(options_.step_seconds));
  // From when it was due, so that a late awakening is made up; but not a pause.
  const Clock::time_point now = Clock::now();
  next_step_ = (now - next_step_ > pace ? now : next_step_) + pace;
}

void NullDecoder::WriteDigests(const ForwardBatch& batch, const KvCacheView& cache) {
  const AttentionBatch& attention = batch.attention;
  digests_.resize(static_cast<size_t>(batch.num_tokens()));
  for (int64_t b = 0; b < attention.num_requests(); ++b) {
    const int64_t begin = attention.query_start_loc[b];
    const int64_t end = attention.query_start_loc[b + 1];
    const int64_t first_position = attention.seq_lens[b] - (end - begin);
    uint64_t digest = kNullDigestStart;
    if (first_position > 0) {
      const int64_t before = first_position - 1;
      const int64_t block = attention.BlockTable(b)[before / cache.block_size];
      std::memcpy(&digest, DigestAt(cache, block * cache.block_size + before % cache.block_size),
                  sizeof(digest));
    }
    for (int64_t t = begin; t < end; ++t) {
      digest = NullDigest(digest, batch.token_ids[t]);
      digests_[static_cast<size_t>(t)] = digest;
      const int64_t slot = attention.slot_mapping[t];
      if (slot != kNoSlot) std::memcpy(DigestAt(cache, slot), &digest, sizeof(digest));
    }
  }
}

}  // namespace

absl::Status CheckNullPool(const KvPoolShape& shape) {
  if (shape.head_dim * SizeOf(shape.dtype) >= static_cast<int64_t>(sizeof(uint64_t))) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrFormat(
      "--load-format null writes 8 bytes where a token's first key would lie; with head_dim %d "
      "and %s there are only %d",
      shape.head_dim, std::string(Name(shape.dtype)), shape.head_dim * SizeOf(shape.dtype)));
}

std::unique_ptr<Decoder> MakeNullDecoder(const NullDecoderOptions& options) {
  return std::make_unique<NullDecoder>(options);
}

}  // namespace lockstep
