#include "runtime/logprobs.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

namespace lockstep {

namespace {

constexpr int32_t kNoId = -1;
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

LogitAndId EntryAt(const std::byte* summary, int64_t i) {
  LogitAndId entry;
  std::memcpy(&entry, summary + sizeof(ExpSum) + static_cast<size_t>(i) * sizeof(LogitAndId),
              sizeof(entry));
  return entry;
}

}  // namespace

int64_t LogprobSummaryBytes(int64_t num_top) {
  return static_cast<int64_t>(sizeof(ExpSum)) + num_top * static_cast<int64_t>(sizeof(LogitAndId));
}

void WriteLogprobSummary(const LogitSlice& slice, float max, int64_t num_top, std::byte* out) {
  const ExpSum sum = SumExp(slice, max);
  std::memcpy(out, &sum, sizeof(sum));
  std::array<LogitAndId, kMaxLogprobs> top;
  top.fill({kMinusInfinity, kNoId});
  if (!std::isnan(max)) SelectTop(slice, std::span(top).first(static_cast<size_t>(num_top)));
  std::memcpy(out + sizeof(sum), top.data(), static_cast<size_t>(num_top) * sizeof(LogitAndId));
}

void ReadLogprobSummaries(const std::byte* first, int64_t rank_bytes, int num_ranks,
                          int64_t num_top, int32_t token, float token_logit,
                          PositionLogprobs& result) {
  result.token = {token, kNan};
  result.top.clear();
  ExpSum sum;
  for (int rank = 0; rank < num_ranks; ++rank) {
    ExpSum part;
    std::memcpy(&part, first + rank * rank_bytes, sizeof(part));
    sum = Add(sum, part);
  }
  if (std::isnan(sum.max) || sum.max == kMinusInfinity) return;
  thread_local std::vector<LogitAndId> merged;
  merged.clear();
  for (int rank = 0; rank < num_ranks; ++rank) {
    for (int64_t i = 0; i < num_top; ++i) {
      const LogitAndId entry = EntryAt(first + rank * rank_bytes, i);
      if (entry.id != kNoId) merged.push_back(entry);
    }
  }
  FillLogprobs(sum.max, LogSumAboveMax(sum), merged, num_top, token, token_logit, result);
}

void FillLogprobs(float max, double log_sum, std::vector<LogitAndId>& merged, int64_t num_top,
                  int32_t token, float token_logit, PositionLogprobs& result) {
  const auto logprob = [&](float logit) {
    return static_cast<float>(static_cast<double>(logit) - max - log_sum);
  };
  result.token = {token, logprob(token_logit)};
  result.top.clear();
  const auto count = std::min(static_cast<size_t>(num_top), merged.size());
  std::partial_sort(merged.begin(), merged.begin() + static_cast<int64_t>(count), merged.end(),
                    Better);
  for (size_t i = 0; i < count; ++i) {
    result.top.push_back({merged[i].id, logprob(merged[i].logit)});
  }
}

LogprobComputer::LogprobComputer(std::vector<Range> vocab_ranges, Communicator& communicator,
                                 ThreadPool& threads)
    : vocab_ranges_(std::move(vocab_ranges)),
      vocab_(vocab_ranges_[static_cast<size_t>(communicator.rank())]),
      communicator_(communicator),
      threads_(threads) {
  LOCKSTEP_CHECK(static_cast<int>(vocab_ranges_.size()) == communicator.size());
  LOCKSTEP_CHECK(vocab_ranges_.back().end < (int64_t{1} << 23));
}

// A row's message: its summary, then the token's logit (of the rank that holds it).
void LogprobComputer::Summarise(const MatrixView& logits, const LogprobRow& row,
                                std::byte* out) const {
  thread_local std::vector<float> block_max;
  block_max.resize(static_cast<size_t>(NumScanBlocks(vocab_.size())));
  const float* x = logits.row<float>(row.logits_row);
  const float max = ScanMax(x, vocab_.size(), block_max.data());
  WriteLogprobSummary({x, block_max.data(), vocab_}, max, row.num_top, out);
  double token_logit = 0;
  if (row.token >= vocab_.begin && row.token < vocab_.end)
    token_logit = x[row.token - vocab_.begin];
  std::memcpy(out + LogprobSummaryBytes(row.num_top), &token_logit, sizeof(token_logit));
}

absl::Status LogprobComputer::Compute(const MatrixView& logits, std::span<const LogprobRow> rows,
                                      std::span<PositionLogprobs> results) {
  LOCKSTEP_CHECK(logits.dtype == DType::kF32 && logits.cols >= vocab_.size());
  LOCKSTEP_CHECK(rows.size() == results.size());
  if (rows.empty()) return absl::OkStatus();
  offsets_.resize(rows.size());
  int64_t rank_bytes = 0;
  for (size_t i = 0; i < rows.size(); ++i) {
    LOCKSTEP_CHECK(rows[i].num_top >= 0 && rows[i].num_top <= kMaxLogprobs);
    LOCKSTEP_CHECK(rows[i].token >= 0 && rows[i].token < vocab_ranges_.back().end);
    offsets_[i] = rank_bytes;
    rank_bytes += LogprobSummaryBytes(rows[i].num_top) + static_cast<int64_t>(sizeof(double));
  }
  send_.resize(static_cast<size_t>(rank_bytes));
  receive_.resize(static_cast<size_t>(rank_bytes) * vocab_ranges_.size());
  // Lambdas with one captured reference: std::function keeps them without allocating.
  const auto for_each_row = [&](const auto& fn) {
    threads_.ParallelFor(static_cast<int64_t>(rows.size()), 1, [&fn](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) fn(static_cast<size_t>(i));
    });
  };
  for_each_row([&](size_t i) { Summarise(logits, rows[i], send_.data() + offsets_[i]); });
  LOCKSTEP_RETURN_IF_ERROR(communicator_.AllGather(send_.data(), rank_bytes, receive_.data()));
  for_each_row([&](size_t i) {
    const LogprobRow& row = rows[i];
    int64_t owner = 0;
    while (row.token >= vocab_ranges_[owner].end) ++owner;
    const std::byte* first = receive_.data() + offsets_[i];
    double token_logit;
    std::memcpy(&token_logit, first + owner * rank_bytes + LogprobSummaryBytes(row.num_top),
                sizeof(token_logit));
    ReadLogprobSummaries(first, rank_bytes, communicator_.size(), row.num_top, row.token,
                         static_cast<float>(token_logit), results[i]);
  });
  return absl::OkStatus();
}

}  // namespace lockstep
