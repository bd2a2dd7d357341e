// What is particular to the CPU backend; the common contract is in paged_attention_test.cc.
#include "attention/cpu_backend.h"

#include <gtest/gtest.h>

#include <cmath>

#include "tests/attention/attention_scenario.h"

namespace lockstep {
namespace {

// Metadata of one decode row over `table`, forwarded over `scenario`'s cache.
void ForwardOverTable(const AttentionBackend& backend, const Scenario& scenario,
                      const std::vector<int32_t>& table, int64_t block_size) {
  const std::vector<int32_t> query_start_loc = {0, 1};
  const std::vector<int32_t> seq_lens = {1};
  const std::vector<int64_t> slots = {0};
  const auto metadata = backend.BuildMetadata({.query_start_loc = query_start_loc,
                                               .seq_lens = seq_lens,
                                               .block_tables = table,
                                               .max_blocks = 1,
                                               .slot_mapping = slots},
                                              block_size);
  ASSERT_TRUE(metadata.ok());
  std::vector<float> row(8, 1.0f);
  const MatrixView view = {.data = row.data(), .rows = 1, .cols = 8, .stride = 8};
  backend.Forward(scenario.geometry(), **metadata, view, scenario.cache(), view);
}

TEST(CpuBackendDeathTest, ACacheThatDoesNotFitTheMetadataIsABug) {
  ThreadPool pool(1);
  const auto backend = CpuBackend::Create(pool);
  const Scenario scenario({.requests = {{.query_len = 1, .seq_len = 1}}});  // 6 blocks of 16
  EXPECT_DEATH(ForwardOverTable(*backend, scenario, {6}, 16), "largest_block");
  EXPECT_DEATH(ForwardOverTable(*backend, scenario, {0}, 8), "block_size");
}

// One backend serves layers of different geometry in turn: its scratch memory must fit each.
TEST(CpuBackendTest, ServesLayersOfDifferentShapes) {
  ThreadPool pool(2);
  const auto backend = CpuBackend::Create(pool);
  for (const int64_t head_dim : {8, 128, 16, 256, 64}) {
    for (const std::vector<int64_t>& groups : {std::vector<int64_t>{1}, {7, 2}, {3}}) {
      const ScenarioShape shape = {
          .requests = {{.query_len = 33, .seq_len = 80}, {.query_len = 1, .seq_len = 300}},
          .group_sizes = groups,
          .head_dim = head_dim};
      Scenario scenario(shape);
      EXPECT_LT(LargestDifference(scenario.RunStep(*backend), scenario.Expected()), 5e-6)
          << Describe(shape);
    }
  }
}

// A rank whose KV head serves none of its query heads computes nothing for it.
TEST(CpuBackendTest, AGroupMayBeEmpty) {
  ThreadPool pool(2);
  const auto backend = CpuBackend::Create(pool);
  Scenario scenario({.requests = {{.query_len = 3, .seq_len = 9}}, .group_sizes = {2, 0, 1}});
  EXPECT_LT(LargestDifference(scenario.RunStep(*backend), scenario.Expected()), 5e-6);
}

TEST(CpuBackendTest, InstructionSetsAgreeClosely) {
  ThreadPool pool(1);
  const CpuKernelList usable = UsableCpuKernels();
  const ScenarioShape shape = {.requests = {{.query_len = 40, .seq_len = 400}},
                               .group_sizes = {3},
                               .head_dim = 64,
                               .kv_dtype = DType::kBF16};
  Scenario scenario(shape);
  const std::vector<float> first =
      scenario.RunStep(*CpuBackend::Create(pool, usable.begin[usable.size - 1]));
  for (int64_t i = 0; i + 1 < usable.size; ++i) {
    const std::vector<float> other = scenario.RunStep(*CpuBackend::Create(pool, usable.begin[i]));
    EXPECT_LT(LargestDifference(other, {first.begin(), first.end()}), 2e-6);
  }
}

}  // namespace
}  // namespace lockstep
