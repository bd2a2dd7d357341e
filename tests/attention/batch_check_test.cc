#include "attention/batch_check.h"

#include <gtest/gtest.h>

#include "attention/cpu_backend.h"
#include "attention/reference_backend.h"

namespace lockstep {
namespace {

// Two requests, of 2 of 5 and 1 of 4 tokens, blocks of 4, and one padding row.
struct Batch {
  std::vector<int32_t> query_start_loc = {0, 2, 3};
  std::vector<int32_t> seq_lens = {5, 4};
  std::vector<int32_t> block_tables = {3, 1, 0, -1};
  int64_t max_blocks = 2;
  std::vector<int64_t> slots = {15, 4, 3, kNoSlot};
  std::vector<int32_t> table_rows = {};

  AttentionBatch View() const {
    return {.query_start_loc = query_start_loc,
            .seq_lens = seq_lens,
            .block_tables = block_tables,
            .max_blocks = max_blocks,
            .slot_mapping = slots,
            .table_rows = table_rows};
  }
};

void ExpectRefused(const Batch& batch, const std::string& words, int64_t block_size = 4) {
  ThreadPool pool(1);
  const auto cpu = CpuBackend::Create(pool);
  const ReferenceBackend reference;
  for (const AttentionBackend* backend :
       std::initializer_list<const AttentionBackend*>{cpu.get(), &reference}) {
    const absl::Status status = backend->BuildMetadata(batch.View(), block_size).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << backend->name();
    EXPECT_NE(std::string(status.message()).find(words), std::string::npos) << status;
  }
}

TEST(BatchCheckTest, AcceptsASoundBatch) {
  EXPECT_TRUE(CheckBatch(Batch().View(), 4).ok());
  EXPECT_EQ(LargestBlock(Batch().View(), 4), 3);
}

TEST(BatchCheckTest, TablesMayLieInAnyRow) {
  Batch batch;
  batch.table_rows = {2, 0};
  batch.block_tables = {0, -1, -1, -1, 7, 1};
  EXPECT_TRUE(CheckBatch(batch.View(), 4).ok());
  EXPECT_EQ(LargestBlock(batch.View(), 4), 7);
  batch.table_rows = {3, 0};
  ExpectRefused(batch, "request 0's block table is row 3 of 6 entries in rows of 2");
  batch.table_rows = {0, -1};
  ExpectRefused(batch, "request 1's block table is row -1");
  batch.table_rows = {0};
  ExpectRefused(batch, "table_rows has 1 entries for 2 requests");
}

TEST(BatchCheckTest, UnusedTableEntriesMayHoldAnything) {
  Batch batch;
  batch.block_tables[3] = 1 << 30;
  EXPECT_TRUE(CheckBatch(batch.View(), 4).ok());
  EXPECT_EQ(LargestBlock(batch.View(), 4), 3);
}

TEST(BatchCheckTest, RefusesWhatContradictsItself) {
  ExpectRefused(Batch(), "block size 0", 0);
  Batch batch;
  batch.query_start_loc = {0, 2};
  ExpectRefused(batch, "query_start_loc has 2 entries for 2 requests, not 3");
  batch = Batch();
  batch.query_start_loc = {1, 2, 3};
  ExpectRefused(batch, "starts with 1");
  batch = Batch();
  batch.query_start_loc = {0, 2, 1};
  ExpectRefused(batch, "falls from 2 to 1 at request 1");
  batch = Batch();
  batch.seq_lens[0] = 1;
  ExpectRefused(batch, "request 0 has 2 new tokens and a length of only 1");
  batch = Batch();
  batch.seq_lens[0] = 9;
  ExpectRefused(batch, "request 0 has 9 tokens, which need 3 blocks of 4; its block table has 2");
  batch = Batch();
  batch.block_tables.pop_back();
  ExpectRefused(batch, "block_tables has 3 entries for 2 requests of 2 blocks");
  batch = Batch();
  batch.block_tables[1] = -1;
  ExpectRefused(batch, "entry 1 of request 0's block table is -1");
  batch = Batch();
  batch.slots = {15, 4};
  ExpectRefused(batch, "query_start_loc ends at 3 and there are 2 tokens");
  batch = Batch();
  batch.slots[3] = 0;
  ExpectRefused(batch, "slot 0 of padding row 3");
  batch = Batch();
  batch.slots[1] = -2;
  ExpectRefused(batch, "slot -2 of token row 1");
}

TEST(BatchCheckDeathTest, WrongViewsAreBugs) {
  std::vector<float> memory(64);
  const MatrixView view = {.data = memory.data(), .rows = 4, .cols = 8, .stride = 8};
  KvCacheView cache = {.keys = memory.data(),
                       .values = memory.data(),
                       .num_blocks = 1,
                       .num_kv_heads = 1,
                       .block_size = 4,
                       .head_dim = 4};
  AttentionGeometry geometry = {
      .num_query_heads = 2, .num_kv_heads = 1, .head_dim = 4, .kv_groups = {{0, 2}}, .scale = 1};
  CheckForwardArguments(geometry, view, cache, view, 4);
  EXPECT_DEATH(CheckForwardArguments(geometry, view, cache, view, 5), "num_tokens");
  geometry.kv_groups = {{0, 1}};  // head 1 belongs to nobody
  EXPECT_DEATH(CheckForwardArguments(geometry, view, cache, view, 4), "next_head");
  geometry.kv_groups = {{0, 2}};
  cache.head_dim = 8;
  EXPECT_DEATH(CheckForwardArguments(geometry, view, cache, view, 4), "head_dim");
  const std::vector<int64_t> slots = {0, 1, -1, 4};  // 4 is beyond the one block
  EXPECT_DEATH(CheckWriteArguments(view, view, slots, cache), "num_slots");
}

}  // namespace
}  // namespace lockstep
