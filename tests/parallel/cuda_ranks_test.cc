#include "parallel/cuda_ranks.h"

#include "gtest/gtest.h"
#include "parallel/local_communicator.h"

namespace lockstep {
namespace {

TEST(CudaRanksTest, DeviceIsTheLocalRankOrTheOnlyOne) {
  EXPECT_EQ(DeviceIndex(0, 1), 0);
  EXPECT_EQ(DeviceIndex(3, 1), 0);  // each rank is shown its own
  EXPECT_EQ(DeviceIndex(0, 4), 0);
  EXPECT_EQ(DeviceIndex(3, 4), 3);
  EXPECT_EQ(DeviceIndex(4, 4), -1);
  EXPECT_EQ(DeviceIndex(0, 0), -1);
}

TEST(CudaRanksTest, LocalRankCountsRanksOfTheSameHost) {
  const std::vector<CudaRank> ranks = {
      {"a", "0", 2}, {"b", "1", 2}, {"a", "2", 2}, {"b", "3", 2}, {"c", "4", 1}};
  const int expected[] = {0, 0, 1, 1, 0};
  for (int rank = 0; rank < 5; ++rank) EXPECT_EQ(LocalRank(ranks, rank), expected[rank]);
}

TEST(CudaRanksTest, OneGpuARankIsFine) {
  EXPECT_TRUE(CheckOneGpuPerRank(std::vector<CudaRank>{{"a", "0", 1}}).ok());
  // The same identifier on another host is another GPU.
  EXPECT_TRUE(CheckOneGpuPerRank(
                  std::vector<CudaRank>{{"a", "0", 2}, {"a", "1", 2}, {"b", "0", 2}, {"b", "1", 2}})
                  .ok());
}

void ExpectRefused(const std::vector<CudaRank>& ranks, const std::vector<std::string>& words) {
  const absl::Status status = CheckOneGpuPerRank(ranks);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  const std::string message(status.message());
  for (const std::string& word : words) {
    EXPECT_NE(message.find(word), std::string::npos) << word << " is not in: " << message;
  }
}

TEST(CudaRanksTest, TwoRanksOnOneGpuAreRefused) {
  ExpectRefused({{"a", "0", 2}, {"b", "7", 1}, {"a", "1", 2}, {"a", "1", 2}},
                {"host a runs 3 ranks (0, 2, 3)", "2 distinct GPUs"});
}

TEST(CudaRanksTest, MoreRanksThanGpusAreRefused) {
  ExpectRefused({{"b", "7", 1}, {"a", "0", 2}, {"a", "1", 2}, {"a", "", 2}},
                {"host a runs 3 ranks (1, 2, 3)", "2 GPUs"});
}

TEST(CudaRanksTest, EveryRankLearnsWhatTheOthersHave) {
  for (const absl::Status& status :
       RunLocalRanks(3, [](Communicator& communicator) -> absl::Status {
         const CudaRank mine = {std::string(300, 'h'), absl::StrCat(communicator.rank()),
                                communicator.rank() + 5};
         LOCKSTEP_ASSIGN_OR_RETURN(const std::vector<CudaRank> ranks,
                                   GatherCudaRanks(communicator, mine));
         EXPECT_EQ(ranks.size(), 3u);
         for (int rank = 0; rank < 3; ++rank) {
           EXPECT_EQ(ranks[rank].host, std::string(255, 'h'));
           EXPECT_EQ(ranks[rank].uuid, absl::StrCat(rank));
           EXPECT_EQ(ranks[rank].num_devices, rank + 5);
         }
         return absl::OkStatus();
       })) {
    EXPECT_TRUE(status.ok()) << status;
  }
}

TEST(CudaRanksTest, WithoutAGpuAllRanksGetTheSameError) {
  if (NumCudaDevices() > 0) GTEST_SKIP() << "this machine has GPUs";
  const std::vector<absl::Status> statuses = RunLocalRanks(
      2, [](Communicator& communicator) { return BindCudaDevice(communicator).status(); });
  for (const absl::Status& status : statuses) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_EQ(status, statuses[0]);
  }
}

}  // namespace
}  // namespace lockstep
