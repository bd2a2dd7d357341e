// Log probabilities of logits whose columns are spread over the ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "parallel/communicator.h"
#include "runtime/core/buffer.h"
#include "runtime/core/range.h"
#include "runtime/core/thread_pool.h"
#include "runtime/logit_scan.h"
#include "runtime/request.h"
#include "runtime/softmax_mass.h"

namespace lockstep {

struct LogprobRow {
  int32_t logits_row = 0;
  int32_t token = 0;    // whose log probability is wanted, [0, V)
  int32_t num_top = 0;  // and those of so many most probable ids, [0, kMaxLogprobs]
};

// log softmax over all V columns, sums as integers (softmax_mass.h): a row's values depend on the
// row alone, not on N. Exchanged between ranks, in one AllGather: the largest logit, the sum, the
// token's logit and the `num_top` best a row.
class LogprobComputer {
 public:
  // As Sampler's.
  LogprobComputer(std::vector<Range> vocab_ranges, Communicator& communicator, ThreadPool& threads);

  // COLLECTIVE, with the same rows on all ranks. results[i] belongs to rows[i], the same on all
  // ranks; a row with NaN or +infinity (or -infinity alone) gives NaN as the token's log
  // probability and no top.
  absl::Status Compute(const MatrixView& logits, std::span<const LogprobRow> rows,
                       std::span<PositionLogprobs> results);

 private:
  void Summarise(const MatrixView& logits, const LogprobRow& row, std::byte* out) const;

  const std::vector<Range> vocab_ranges_;
  const Range vocab_;  // this rank's
  Communicator& communicator_;
  ThreadPool& threads_;

  // Kept between calls.
  std::vector<int64_t> offsets_;  // [rows + 1] within a rank's message
  std::vector<std::byte> send_;
  std::vector<std::byte> receive_;
};

// What a rank tells of a row's raw logits: an ExpSum, then `num_top` LogitAndId, best first, those
// beyond its own columns with id -1.
int64_t LogprobSummaryBytes(int64_t num_top);
void WriteLogprobSummary(const LogitSlice& slice, float max, int64_t num_top, std::byte* out);

// Fills result.top with the `num_top` best of `merged`, which is reordered, and result.token, from
// raw logits: log_sum is log(sum of exp(logit - max)).
void FillLogprobs(float max, double log_sum, std::vector<LogitAndId>& merged, int64_t num_top,
                  int32_t token, float token_logit, PositionLogprobs& result);

// From all ranks' summaries, rank r's at first + r * rank_bytes. Fills result.top and
// result.token; `token_logit` is raw. A row without log probabilities: NaN and no top.
void ReadLogprobSummaries(const std::byte* first, int64_t rank_bytes, int num_ranks,
                          int64_t num_top, int32_t token, float token_logit,
                          PositionLogprobs& result);

}  // namespace lockstep
