// The kernels of CudaSampler, and what they pass to each other. All pointers are device memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "runtime/core/cuda_device.h"
#include "runtime/core/range.h"
#include "runtime/logit_adjuster.h"
#include "runtime/row_filter.h"

namespace lockstep {

// The id of a rank's Candidate when the row holds NaN or +infinity.
inline constexpr int32_t kBadRow = -2;

// How a row comes to its token: its largest logit, the Gumbel race of all ids, that of its best
// few (a small top_k), that of what filters over the whole vocabulary leave.
enum class DeviceRowKind : int32_t { kGreedy, kDraw, kCandidates, kFilter };

// A row to sample.
struct DeviceRow {
  uint64_t row_key = 0;  // of its random bits
  double inverse_temperature = 0;
  double top_p = 1;
  double min_p = 0;
  double scale = 1;  // MassScale of the temperature
  LogitPenalties penalties;
  DeviceRowKind kind = DeviceRowKind::kGreedy;
  int32_t logits_row = 0;
  int32_t slot = 0;
  int32_t top_k = 0;
  int32_t num_logprobs = -1;  // -1: none
  // Of the step's arrays, where the row's part begins.
  int32_t first_adjustment = 0;
  int32_t num_adjustments = 0;
  int32_t first_candidate = 0;
  int32_t sum_index = 0;
  int32_t first_top = 0;
};

// What the adjuster of a row does to one of the rank's columns.
struct DeviceAdjustment {
  double bias = 0;
  int32_t column = 0;
  int32_t generated = 0;
  int32_t row = 0;  // of DeviceRow
  uint8_t banned = 0;
  uint8_t in_prompt = 0;
  uint16_t unused = 0;
  float raw = 0;  // written by the device: the logit before
  int32_t unused_too = 0;
};

// Of a row's raw logits on a rank: sum of exp(logit - max). max is NaN when the row is bad.
struct LogitSum {
  double sum = 0;
  float max = 0;
  int32_t unused = 0;
};

// A rank's message: the digest, a Candidate a row (its logit is the rank's largest, the rest the
// rank's best id's, where that decides), then the parts that some rows have. All ranks have the
// same layout.
struct MessageHeader {
  uint64_t digest = 0;
  uint64_t unused = 0;
};
struct MessageTotals {
  int64_t sums = 0;
  int64_t tops = 0;
  int64_t candidates = 0;
};
struct MessageLayout {
  int64_t sums = 0;        // LogitSum a row with log probabilities
  int64_t tops = 0;        // LogitAndId, num_logprobs a row, best first; id -1 behind the last
  int64_t candidates = 0;  // Candidate, top_k a row of kCandidates, best logit first
  int64_t bytes = 0;
};

MessageLayout LayoutOf(int64_t num_rows, const MessageTotals& totals);

// The best of a part of a row.
struct RowPart {
  double score = 0;
  float max = 0;
  int32_t id = -1;
  int32_t bad = 0;
  int32_t unused = 0;
};
// What SelectTop finds in a part of a row besides its best ids.
struct SelectedPart {
  double sum = 0;  // of exp(logit - max)
  float max = 0;
  int32_t bad = 0;
};
// Parts of a row in SelectTop, whatever the batch: sums must not depend on it.
inline constexpr int kSelectParts = 8;
inline constexpr int kMaxSelected = 160;  // ids of a row

struct SamplingStep {
  float* logits = nullptr;  // [R, stride], columns of `vocab`; adjusted in place
  int64_t stride = 0;
  Range vocab;
  uint64_t digest = 0;
  const DeviceRow* rows = nullptr;
  int64_t num_rows = 0;
  DeviceAdjustment* adjustments = nullptr;
  int64_t num_adjustments = 0;
  std::byte* message = nullptr;  // this rank's
  MessageLayout layout;

  // Scratch memory.
  uint32_t* arrivals = nullptr;            // [rows], 0 between launches
  int64_t num_parts = 0;                   // blocks a row in ScanRows
  RowPart* parts = nullptr;                // [rows, num_parts]
  SelectedPart* selected_parts = nullptr;  // [rows, kSelectParts]
  uint64_t* selected = nullptr;            // [entries, kSelectParts]
};
// Blocks a row so that the GPU is busy, and none of them has too little to do.
int64_t NumParts(int64_t num_rows, int64_t local_vocab, int num_multiprocessors);

// Sums and best ids of the raw logits, of rows with log probabilities.
absl::Status SummariseLogits(const SamplingStep& step, CudaStream stream);
absl::Status AdjustLogits(const SamplingStep& step, CudaStream stream);
// race: everything about rows of kDraw. Else: about those of kGreedy, and the largest logit of
// those of kFilter.
absl::Status ScanRows(const SamplingStep& step, bool race, CudaStream stream);
// The best ids of rows of kCandidates.
absl::Status SelectCandidates(const SamplingStep& step, CudaStream stream);

struct SamplingResults {
  const DeviceRow* rows = nullptr;
  int64_t num_rows = 0;
  bool has_candidates = false;
  const std::byte* messages = nullptr;  // [N] of layout
  MessageLayout layout;
  int64_t num_ranks = 0;
  uint64_t* digests = nullptr;     // [N]
  int32_t* tokens = nullptr;       // [rows]
  float* raws = nullptr;           // [rows] the tokens' raw logits, with log probabilities
  int32_t* last_tokens = nullptr;  // by slot
};
// Picks the winners of rows of other kinds than kFilter from all ranks' messages.
absl::Status PickTokens(const SamplingResults& results, CudaStream stream);

// last_tokens[slots[i]] = tokens[i], 0 for a negative one.
absl::Status StoreTokens(const int32_t* slots, const int32_t* tokens, int64_t count,
                         int32_t* last_tokens, CudaStream stream);

}  // namespace lockstep
