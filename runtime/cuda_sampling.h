// The kernels of CudaSampler, and what they pass to each other. All pointers are device memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "runtime/core/cuda_device.h"
#include "runtime/core/range.h"
#include "runtime/row_filter.h"

namespace lockstep {

// The id of a rank's Candidate when the row holds NaN or +infinity.
inline constexpr int32_t kBadRow = -2;

enum class DeviceRowKind : int32_t { kGreedy, kDraw };

// A row to sample.
struct DeviceRow {
  uint64_t row_key = 0;  // of its random bits
  double inverse_temperature = 0;
  int32_t logits_row = 0;
  int32_t slot = 0;
  DeviceRowKind kind = DeviceRowKind::kGreedy;
  int32_t unused = 0;
};

// A rank's message: the digest, then a Candidate a row. Candidate::logit is the rank's largest, the
// rest its best id's.
struct MessageHeader {
  uint64_t digest = 0;
  uint64_t unused = 0;
};

// The best of a part of a row.
struct RowPart {
  double score = 0;
  float max = 0;
  int32_t id = -1;
  int32_t bad = 0;
  int32_t unused = 0;
};

struct SamplingStep {
  const float* logits = nullptr;  // [R, stride], columns of `vocab`
  int64_t stride = 0;
  Range vocab;
  uint64_t digest = 0;
  const DeviceRow* rows = nullptr;
  int64_t num_rows = 0;
  int64_t num_parts = 0;         // blocks a row
  RowPart* parts = nullptr;      // [rows, num_parts]
  uint32_t* arrivals = nullptr;  // [rows], 0 between launches
  std::byte* message = nullptr;  // this rank's
};
// Blocks a row so that the GPU is busy, and none of them has too little to do.
int64_t NumParts(int64_t num_rows, int64_t local_vocab, int num_multiprocessors);
// Fills the rank's message.
absl::Status ScanRows(const SamplingStep& step, CudaStream stream);

struct SamplingResults {
  const DeviceRow* rows = nullptr;
  int64_t num_rows = 0;
  const std::byte* messages = nullptr;  // [N, message_bytes]
  int64_t message_bytes = 0;
  int64_t num_ranks = 0;
  uint64_t* digests = nullptr;     // [N]
  int32_t* tokens = nullptr;       // [rows]
  int32_t* last_tokens = nullptr;  // by slot
};
// Picks the winners from all ranks' messages.
absl::Status PickTokens(const SamplingResults& results, CudaStream stream);

// last_tokens[slots[i]] = tokens[i], 0 for a negative one.
absl::Status StoreTokens(const int32_t* slots, const int32_t* tokens, int64_t count,
                         int32_t* last_tokens, CudaStream stream);

}  // namespace lockstep
