#include "runtime/kv_budget.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "runtime/host_memory.h"

namespace lockstep {
namespace {

ModelConfig ConfigOf(RopeType type, double factor, int64_t trained) {
  ModelConfig config;
  config.max_position_embeddings = 4096;
  config.rope.type = type;
  config.rope.factor = factor;
  config.rope.original_max_position_embeddings = trained;
  return config;
}

TEST(KvBudgetTest, LongestRequestFollowsTheRopeScaling) {
  struct Case {
    ModelConfig config;
    int64_t limit;
  };
  const Case cases[] = {
      {ConfigOf(RopeType::kPlain, 1, 4096), 4096},   {ConfigOf(RopeType::kLinear, 4, 4096), 16384},
      {ConfigOf(RopeType::kDynamic, 2, 4096), 8192}, {ConfigOf(RopeType::kLlama3, 8, 512), 4096},
      {ConfigOf(RopeType::kYarn, 4, 2048), 8192},    {ConfigOf(RopeType::kYarn, 4, 512), 4096}};
  for (const Case& c : cases) {
    EngineOptions options;
    EXPECT_EQ(*WantedModelLen(options, c.config), 4096) << "the default does not stretch";
    options.max_model_len = c.limit;
    EXPECT_EQ(*WantedModelLen(options, c.config), c.limit);
    options.max_model_len = c.limit + 1;
    const std::string message(WantedModelLen(options, c.config).status().message());
    EXPECT_NE(message.find(std::to_string(c.limit)), std::string::npos) << message;
    EXPECT_NE(message.find(std::to_string(c.limit + 1)), std::string::npos) << message;
  }
}

TEST(KvBudgetTest, BlocksOfARank) {
  EngineOptions options;
  options.block_size = 16;
  options.max_num_seqs = 10;
  // Automatic: as many sequences as may run, within 4 GiB a host (or one sequence, if that is more)
  // and a quarter of the free memory, over the host's ranks.
  constexpr int64_t kGiB = int64_t{1} << 30;
  EXPECT_EQ(LocalNumBlocks(options, 1000, 1024, kGiB, 1), 63 * 10);
  EXPECT_EQ(LocalNumBlocks(options, 1000, kGiB / 100, 1000 * kGiB, 2), 2 * 100);
  EXPECT_EQ(LocalNumBlocks(options, 10000, kGiB / 100, 1000 * kGiB, 2), 625);
  EXPECT_EQ(LocalNumBlocks(options, 1000, 1024, 8 * 10 * 1024, 2), 10);
  EXPECT_EQ(LocalNumBlocks(options, 1000, 1024, 0, 2), 0);
  // Explicit: neither more nor less, shared by the host's ranks.
  options.kv_cache_memory_bytes = 5 * 1024 + 1023;
  EXPECT_EQ(LocalNumBlocks(options, 1000, 1024, 0, 1), 5);
  EXPECT_EQ(LocalNumBlocks(options, 1000, 1024, 0, 2), 2);
  options.num_gpu_blocks_override = 77;
  EXPECT_EQ(LocalNumBlocks(options, 1000, 1024, 0, 2), 77);
}

TEST(KvBudgetTest, ANumberOfBlocksSetsTheLength) {
  EngineOptions options;
  options.block_size = 16;
  options.num_gpu_blocks_override = 49;
  options.max_model_len = 4096;
  const auto budget = MakeKvBudget(options, 4096, std::vector<int64_t>{49, 49});
  ASSERT_TRUE(budget.ok()) << budget.status();
  EXPECT_EQ(budget->num_blocks, 49);
  EXPECT_EQ(budget->max_model_len, 784);
}

TEST(KvBudgetTest, TheLeastRankLimits) {
  EngineOptions options;
  options.block_size = 16;
  const std::vector<int64_t> blocks = {30, 20, 40, 20};
  const auto budget = MakeKvBudget(options, 1000, blocks);
  ASSERT_TRUE(budget.ok());
  EXPECT_EQ(budget->num_blocks, 20);
  EXPECT_EQ(budget->limiting_rank, 1);
  EXPECT_EQ(budget->max_model_len, 320);
  EXPECT_EQ(MakeKvBudget(options, 100, blocks)->max_model_len, 100);

  options.max_model_len = 321;
  const std::string message(MakeKvBudget(options, 321, blocks).status().message());
  for (const char* part : {"321", "320", "rank 1"}) {
    EXPECT_NE(message.find(part), std::string::npos) << message;
  }
  options.max_model_len = 320;
  EXPECT_TRUE(MakeKvBudget(options, 320, blocks).ok());
  const std::vector<int64_t> none = {30, 0};
  options.max_model_len = 0;
  EXPECT_EQ(MakeKvBudget(options, 1000, none).status().code(),
            absl::StatusCode::kResourceExhausted);
}

class HostMemoryTest : public testing::Test {
 protected:
  HostMemoryTest()
      : root_(testing::TempDir() + "host_memory_" +
              testing::UnitTest::GetInstance()->current_test_info()->name()) {
    std::filesystem::remove_all(root_);
    Write("proc/meminfo", "MemTotal:  100 kB\nMemFree:   10 kB\nMemAvailable:   64 kB\n");
  }
  ~HostMemoryTest() override { std::filesystem::remove_all(root_); }

  void Write(const std::string& path, const std::string& text) {
    const std::filesystem::path full = root_ + "/" + path;
    std::filesystem::create_directories(full.parent_path());
    std::ofstream(full) << text;
  }
  int64_t Available() const { return AvailableHostMemoryBytes(root_ + "/proc", root_ + "/cgroup"); }

 private:
  const std::string root_;
};

TEST_F(HostMemoryTest, WithoutControlGroup) { EXPECT_EQ(Available(), 65536); }

TEST_F(HostMemoryTest, LimitOfAControlGroupV2OrItsParent) {
  Write("proc/self/cgroup", "0::/job/step\n");
  Write("cgroup/job/step/memory.max", "max\n");
  Write("cgroup/job/step/memory.current", "50000\n");
  EXPECT_EQ(Available(), 65536);
  Write("cgroup/job/memory.max", "60000\n");
  Write("cgroup/job/memory.current", "50000\n");
  Write("cgroup/job/memory.stat", "anon 1\nfile 2\ninactive_file 2000\n");
  EXPECT_EQ(Available(), 12000);
  Write("cgroup/job/step/memory.max", "55000\n");
  EXPECT_EQ(Available(), 5000);
}

TEST_F(HostMemoryTest, LimitOfAControlGroupV1) {
  Write("proc/self/cgroup", "9:cpu,cpuacct:/\n4:memory:/job\n0::/\n");
  Write("cgroup/memory/job/memory.limit_in_bytes", "30000\n");
  Write("cgroup/memory/job/memory.usage_in_bytes", "10000\n");
  Write("cgroup/memory/job/memory.stat", "cache 1\ninactive_file 1\ntotal_inactive_file 500\n");
  EXPECT_EQ(Available(), 20500);
  Write("cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  Write("cgroup/memory/memory.usage_in_bytes", "100\n");
  EXPECT_EQ(Available(), 20500);
}

TEST_F(HostMemoryTest, ThisHostHasSome) { EXPECT_GT(AvailableHostMemoryBytes(), 1 << 20); }

}  // namespace
}  // namespace lockstep
