// Drives decoders through steps over the paged pool, as the engine does, with threads as ranks.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "attention/attention_backend.h"
#include "cache/kv_pool.h"
#include "model/decoder.h"
#include "parallel/communicator.h"
#include "runtime/core/thread_pool.h"

namespace lockstep {

// New tokens of one request; `request` names it across steps.
struct Chunk {
  int request = 0;
  std::vector<int32_t> tokens;
  int64_t first_position = 0;
  int64_t prompt_length = 0;
};

using Logits = std::vector<std::vector<float>>;  // [R][V]

struct RunnerOptions {
  DType dtype = DType::kF32;
  DType kv_dtype = DType::kF32;
  int num_threads = 1;
  int64_t max_num_batched_tokens = 256;
  int64_t max_model_len = 512;
  bool last_rows_only = false;  // Step gives the logits of each chunk's last token alone
  int64_t padding = 0;          // rows added to each step that belong to no request
};

// One rank: decoder, backend and a poisoned pool. Requests get blocks in a scattered order that is
// alike on all ranks.
class ModelRunner {
 public:
  static constexpr int64_t kBlockSize = 4;

  static absl::StatusOr<std::unique_ptr<ModelRunner>> Create(const ModelSource& source,
                                                             const RunnerOptions& options,
                                                             Communicator& communicator);

  Decoder& decoder() const { return *decoder_; }
  KvPool& pool() const { return *pool_; }
  const std::vector<RankPartition>& partition() const { return partition_; }
  ThreadPool& threads() { return threads_; }
  // Blocks of a request; may be altered between steps.
  std::vector<int32_t>& table(int request) { return tables_[request]; }
  // Called in each step after the decoder's forward pass.
  void set_after_forward(std::function<absl::Status(const ForwardBatch&)> after_forward) {
    after_forward_ = std::move(after_forward);
  }

  // COLLECTIVE. One step; the logits of all its tokens, whole rows, on every rank.
  absl::StatusOr<Logits> Step(const std::vector<Chunk>& chunks);

  // COLLECTIVE. Steps of at most `chunk_size` tokens; the logits of every token of the prompt.
  absl::StatusOr<Logits> Prefill(int request, const std::vector<int32_t>& prompt,
                                 int64_t chunk_size);

  // COLLECTIVE. The ids that follow the prompt by argmax (the lowest id on ties), one a step.
  absl::StatusOr<std::vector<int32_t>> Greedy(int request, const std::vector<int32_t>& prompt,
                                              int64_t chunk_size, int64_t num_tokens);

 private:
  ModelRunner(const RunnerOptions& options, Communicator& communicator)
      : options_(options), communicator_(communicator), threads_(options.num_threads) {}
  void GrowTable(int request, int64_t num_tokens);
  absl::StatusOr<Logits> GatherLogits(const Buffer& mine, int64_t rows) const;

  const RunnerOptions options_;
  Communicator& communicator_;
  ThreadPool threads_;
  std::vector<RankPartition> partition_;
  std::unique_ptr<AttentionBackend> backend_;
  std::unique_ptr<Decoder> decoder_;
  std::unique_ptr<KvPool> pool_;
  std::vector<int32_t> free_blocks_;
  std::map<int, std::vector<int32_t>> tables_;
  std::function<absl::Status(const ForwardBatch&)> after_forward_;
};

int32_t ArgMax(const std::vector<float>& row);

// Runs body on `num_ranks` ranks, and fails the test with every rank's error.
void RunRanks(const ModelSource& source, int num_ranks, const RunnerOptions& options,
              const std::function<absl::Status(ModelRunner&, Communicator&)>& body);

}  // namespace lockstep
