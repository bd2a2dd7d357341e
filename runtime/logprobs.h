// Log probabilities of logits whose columns are spread over the ranks.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "parallel/communicator.h"
#include "runtime/core/buffer.h"
#include "runtime/core/range.h"
#include "runtime/core/thread_pool.h"
#include "runtime/request.h"

namespace lockstep {

struct LogprobRow {
  int32_t logits_row = 0;
  int32_t token = 0;    // whose log probability is wanted, [0, V)
  int32_t num_top = 0;  // and those of so many most probable ids, [0, kMaxLogprobs]
};

// log softmax over all V columns, sums in double precision: a row's values depend on the row alone.
// Exchanged between ranks: the largest logit, the sum and the `num_top` best a row.
class LogprobComputer {
 public:
  // As Sampler's.
  LogprobComputer(std::vector<Range> vocab_ranges, Communicator& communicator, ThreadPool& threads);

  // COLLECTIVE, with the same rows on all ranks. results[i] belongs to rows[i], the same on all
  // ranks; a row with NaN or +infinity gives NaN as the token's log probability and no top.
  absl::Status Compute(const MatrixView& logits, std::span<const LogprobRow> rows,
                       std::span<PositionLogprobs> results);
};

}  // namespace lockstep
