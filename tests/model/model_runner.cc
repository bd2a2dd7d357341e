#include "tests/model/model_runner.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>

#include "attention/selector.h"
#include "cache/block_table.h"
#include "parallel/local_communicator.h"

namespace lockstep {

absl::StatusOr<std::unique_ptr<ModelRunner>> ModelRunner::Create(const ModelSource& source,
                                                                 const RunnerOptions& options,
                                                                 Communicator& communicator) {
  std::unique_ptr<ModelRunner> runner(new ModelRunner(options, communicator));
  LOCKSTEP_ASSIGN_OR_RETURN(runner->partition_,
                            PartitionModel(source.config.Dims(), communicator.size()));
  AttentionRequirements needs;
  needs.kv_dtype = options.kv_dtype;
  needs.head_dim = source.config.head_dim;
  needs.block_size = kBlockSize;
  needs.sliding_window = true;
  LOCKSTEP_ASSIGN_OR_RETURN(BackendSelection selection, SelectBackend(needs, "", runner->threads_));
  runner->backend_ = std::move(selection.backend);
  DecoderOptions decoder_options;
  decoder_options.dtype = options.dtype;
  decoder_options.max_num_batched_tokens = options.max_num_batched_tokens;
  decoder_options.max_model_len = options.max_model_len;
  LOCKSTEP_ASSIGN_OR_RETURN(runner->decoder_,
                            Decoder::Load(source, runner->partition_, decoder_options,
                                          *runner->backend_, communicator, runner->threads_));
  const AttentionGeometry& geometry = runner->decoder_->Geometry(0);
  const KvPoolShape shape = {source.config.num_layers, geometry.num_kv_heads, geometry.head_dim,
                             kBlockSize, options.kv_dtype};
  const int64_t num_blocks = 2 * options.max_model_len / kBlockSize;
  LOCKSTEP_ASSIGN_OR_RETURN(KvPool pool, KvPool::Create(shape, num_blocks));
  runner->pool_ = std::make_unique<KvPool>(std::move(pool));
  for (int64_t block = 0; block < num_blocks; ++block)
    LOCKSTEP_CHECK(runner->pool_->Poison(block).ok());
  runner->free_blocks_.resize(num_blocks);
  std::iota(runner->free_blocks_.begin(), runner->free_blocks_.end(), 0);
  std::shuffle(runner->free_blocks_.begin(), runner->free_blocks_.end(), std::mt19937(7));
  return runner;
}

void ModelRunner::GrowTable(int request, int64_t num_tokens) {
  std::vector<int32_t>& table = tables_[request];
  while (static_cast<int64_t>(table.size()) < BlocksForTokens(num_tokens, kBlockSize)) {
    LOCKSTEP_CHECK(!free_blocks_.empty());
    table.push_back(free_blocks_.back());
    free_blocks_.pop_back();
  }
}

absl::StatusOr<Logits> ModelRunner::Step(const std::vector<Chunk>& chunks) {
  std::vector<int32_t> ids, positions, rope_lengths, rows, starts = {0}, seq_lens, tables;
  std::vector<int64_t> slots;
  size_t max_blocks = 1;
  for (const Chunk& chunk : chunks) {
    const int64_t count = static_cast<int64_t>(chunk.tokens.size());
    GrowTable(chunk.request, chunk.first_position + count);
    max_blocks = std::max(max_blocks, tables_[chunk.request].size());
  }
  for (const Chunk& chunk : chunks) {
    const int64_t count = static_cast<int64_t>(chunk.tokens.size());
    std::vector<int32_t> table = tables_[chunk.request];
    slots.resize(slots.size() + count);
    FillSlotMapping(table, kBlockSize, chunk.first_position, count,
                    slots.data() + slots.size() - count);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t position = chunk.first_position + i;
      if (!options_.last_rows_only || i + 1 == count) {
        rows.push_back(static_cast<int32_t>(ids.size()));
      }
      ids.push_back(chunk.tokens[i]);
      positions.push_back(static_cast<int32_t>(position));
      rope_lengths.push_back(static_cast<int32_t>(std::max(chunk.prompt_length, position + 1)));
    }
    starts.push_back(static_cast<int32_t>(ids.size()));
    seq_lens.push_back(static_cast<int32_t>(chunk.first_position + count));
    table.resize(max_blocks, -1);
    tables.insert(tables.end(), table.begin(), table.end());
  }
  for (int64_t i = 0; i < options_.padding; ++i) {
    ids.push_back(0);
    positions.push_back(0);
    rope_lengths.push_back(1);
    slots.push_back(kNoSlot);
  }
  ForwardBatch batch;
  batch.token_ids = ids;
  batch.positions = positions;
  batch.rope_lengths = rope_lengths;
  batch.logits_rows = rows;
  batch.attention = {starts, seq_lens, tables, static_cast<int64_t>(max_blocks), slots};
  const int64_t local_vocab = partition_[communicator_.rank()].vocab.size();
  const int64_t num_rows = static_cast<int64_t>(rows.size());
  LOCKSTEP_ASSIGN_OR_RETURN(const Buffer mine,
                            Buffer::Create(num_rows * local_vocab * 4, "logits"));
  if (num_rows > 0) std::memset(mine.data(), 0xff, mine.size_bytes());  // NaN
  LOCKSTEP_RETURN_IF_ERROR(decoder_->Forward(
      batch, *pool_, {mine.data(), DType::kF32, num_rows, local_vocab, local_vocab}));
  if (after_forward_) LOCKSTEP_RETURN_IF_ERROR(after_forward_(batch));
  return GatherLogits(mine, num_rows);
}

absl::StatusOr<Logits> ModelRunner::GatherLogits(const Buffer& mine, int64_t rows) const {
  std::vector<int64_t> bytes;
  for (const RankPartition& part : partition_) bytes.push_back(rows * part.vocab.size() * 4);
  std::vector<float> all(std::accumulate(bytes.begin(), bytes.end(), int64_t{0}) / 4);
  LOCKSTEP_RETURN_IF_ERROR(communicator_.AllGatherV(mine.data(), bytes, all.data()));
  Logits logits(rows);
  const float* next = all.data();
  for (const RankPartition& part : partition_) {
    for (std::vector<float>& row : logits) {
      row.insert(row.end(), next, next + part.vocab.size());
      next += part.vocab.size();
    }
  }
  return logits;
}

absl::StatusOr<Logits> ModelRunner::Prefill(int request, const std::vector<int32_t>& prompt,
                                            int64_t chunk_size) {
  Logits logits;
  const int64_t length = static_cast<int64_t>(prompt.size());
  for (int64_t first = 0; first < length; first += chunk_size) {
    const int64_t end = std::min(length, first + chunk_size);
    LOCKSTEP_ASSIGN_OR_RETURN(
        Logits rows,
        Step({{request, {prompt.begin() + first, prompt.begin() + end}, first, length}}));
    for (std::vector<float>& row : rows) logits.push_back(std::move(row));
  }
  return logits;
}

absl::StatusOr<std::vector<int32_t>> ModelRunner::Greedy(int request,
                                                         const std::vector<int32_t>& prompt,
                                                         int64_t chunk_size, int64_t num_tokens) {
  LOCKSTEP_ASSIGN_OR_RETURN(const Logits prefill, Prefill(request, prompt, chunk_size));
  const int64_t length = static_cast<int64_t>(prompt.size());
  std::vector<int32_t> ids = {ArgMax(prefill.back())};
  while (static_cast<int64_t>(ids.size()) < num_tokens) {
    const int64_t position = length + static_cast<int64_t>(ids.size()) - 1;
    LOCKSTEP_ASSIGN_OR_RETURN(const Logits next, Step({{request, {ids.back()}, position, length}}));
    ids.push_back(ArgMax(next.back()));
  }
  return ids;
}

int32_t ArgMax(const std::vector<float>& row) {
  return static_cast<int32_t>(std::max_element(row.begin(), row.end()) - row.begin());
}

void RunRanks(const ModelSource& source, int num_ranks, const RunnerOptions& options,
              const std::function<absl::Status(ModelRunner&, Communicator&)>& body) {
  const std::vector<absl::Status> statuses =
      RunLocalRanks(num_ranks, [&](Communicator& communicator) -> absl::Status {
        absl::StatusOr<std::unique_ptr<ModelRunner>> runner =
            ModelRunner::Create(source, options, communicator);
        LOCKSTEP_RETURN_IF_ERROR(Agree(communicator, runner.status()));
        return body(**runner, communicator);
      });
  for (int rank = 0; rank < num_ranks; ++rank) {
    EXPECT_TRUE(statuses[rank].ok()) << "rank " << rank << ": " << statuses[rank];
  }
}

}  // namespace lockstep
