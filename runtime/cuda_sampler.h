// The Sampler on a device: the next token of each row, from logits in device memory whose columns
// are spread over the ranks, without the host. All work goes to the rank's stream.
//
// The ids are those of the Sampler for equal logits: the same order, the same noise, masses in the
// same integers. Only the logarithms of the noise may differ in the last bit of a double (those of
// CUDA are not correctly rounded either), which shows where two scores are that close.
//
// One exchange over NCCL carries a Candidate a row, what some rows have besides, and the digest;
// rows of top_p, of min_p or of a large top_k over the whole vocabulary need a fixed number of
// rounds more (cuda_filter.h). No row of logits is gathered. Every rank makes the same of it, so
// all devices end with the same tokens. Log probabilities are sums in double in a fixed order: they
// depend on the row and on N alone, and are the same on all ranks.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "parallel/nccl_communicator.h"
#include "runtime/core/buffer.h"
#include "runtime/core/cuda_device.h"
#include "runtime/sampler.h"

namespace lockstep {

struct CudaSamplerOptions {
  std::vector<Range> vocab_ranges;  // of all ranks, in rank order; they partition [0, V)
  int rank = 0;
  int64_t max_rows = 0;  // of a step
  int steps_in_flight = 1;
  CudaStream stream = nullptr;
  NcclCommunicator* nccl = nullptr;            // null: one rank
  const std::atomic<bool>* stopped = nullptr;  // not null: Wait ends with Aborted when it is true
};

// Thread rule: the rank's engine thread.
class CudaSampler {
 public:
  virtual ~CudaSampler() = default;

  // Makes all memory, of the selected device and of the host. Unimplemented in a build without
  // CUDA.
  static absl::StatusOr<std::unique_ptr<CudaSampler>> Create(const CudaSamplerOptions& options);

  // Whether Launch takes these rows: false where their lists (best ids, log probabilities,
  // adjustments of a step) outgrow the memory made for them, which holds 256 rows with the largest
  // top_k and num_logprobs, and a million adjusted logits. The same on all ranks.
  virtual bool Supports(std::span<const SampleRow> rows) const = 0;

  // COLLECTIVE, with the same rows on all ranks. Issues the sampling of float32 [R, V_local] in
  // device memory; rows with an adjuster are changed in place. The token of row i also becomes
  // last_tokens[slots[i]] (device memory), 0 for a failed one. Nothing that is passed is read by
  // the host afterwards. At most steps_in_flight launches may wait for their Wait.
  virtual absl::Status Launch(const MatrixView& logits, std::span<const SampleRow> rows,
                              std::span<const int32_t> slots, uint64_t digest,
                              int32_t* last_tokens) = 0;
  // Waits for the oldest launch, and everything issued before it; as Sampler::Sample's output.
  virtual absl::Status Wait(SampleOutput& output) = 0;

  // Issues the same for tokens that the host has sampled, when no launch waits for its Wait.
  virtual absl::Status PutTokens(std::span<const int32_t> slots, std::span<const int32_t> tokens,
                                 int32_t* last_tokens) = 0;
};

}  // namespace lockstep
