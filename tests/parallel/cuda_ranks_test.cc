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

// Containers and images of one disk often have one name on every machine.
TEST(CudaRanksTest, HostsOfOneNameAreToldApart) {
  const auto rank = [](int64_t first_rank_on_host, const char* uuid) {
    return CudaRank{"node", uuid, 2, "H200", 132, first_rank_on_host};
  };
  const std::vector<CudaRank> ranks = {rank(0, "0"), rank(0, "1"), rank(2, "0"), rank(2, "1")};
  const int expected[] = {0, 1, 0, 1};
  for (int r = 0; r < 4; ++r) EXPECT_EQ(LocalRank(ranks, r), expected[r]);
  EXPECT_TRUE(CheckOneGpuPerRank(ranks).ok());
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

CudaRank OfKind(const std::string& host, const std::string& name, int64_t num_multiprocessors) {
  return {host, name + host, 2, name, num_multiprocessors};
}

TEST(CudaRanksTest, GpusOfOneKindAreFine) {
  const CudaRank h200 = OfKind("a", "NVIDIA H200", 132);
  EXPECT_TRUE(CheckSameKindOfGpu(std::vector{h200}).ok());
  EXPECT_TRUE(CheckSameKindOfGpu(std::vector{h200, h200, OfKind("b", "NVIDIA H200", 132)}).ok());
}

TEST(CudaRanksTest, GpusOfDifferentKindsAreRefused) {
  const CudaRank h200 = OfKind("a", "NVIDIA H200", 132);
  absl::Status status = CheckSameKindOfGpu(
      std::vector{h200, h200, OfKind("b", "NVIDIA H100 PCIe", 114), OfKind("c", "Other", 1)});
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("rank 0 (host a) has NVIDIA H200, 132 multiprocessors; rank 2 "
                                  "(host b) has NVIDIA H100 PCIe, 114 multiprocessors. "),
            absl::string_view::npos)
      << status;
  // One name, another number: a part of a GPU, say.
  status = CheckSameKindOfGpu(std::vector{h200, OfKind("a", "NVIDIA H200", 66)});
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("rank 1 (host a) has NVIDIA H200, 66 multiprocessors"),
            absl::string_view::npos)
      << status;
}

TEST(CudaRanksTest, EveryRankLearnsWhatTheOthersHave) {
  for (const absl::Status& status :
       RunLocalRanks(3, [](Communicator& communicator) -> absl::Status {
         const CudaRank mine = {std::string(300, 'h'), absl::StrCat(communicator.rank()),
                                communicator.rank() + 5, absl::StrCat("GPU ", communicator.rank()),
                                100 + communicator.rank()};
         LOCKSTEP_ASSIGN_OR_RETURN(const std::vector<CudaRank> ranks,
                                   GatherCudaRanks(communicator, mine));
         EXPECT_EQ(ranks.size(), 3u);
         for (int rank = 0; rank < 3; ++rank) {
           EXPECT_EQ(ranks[rank].host, std::string(255, 'h'));
           EXPECT_EQ(ranks[rank].uuid, absl::StrCat(rank));
           EXPECT_EQ(ranks[rank].num_devices, rank + 5);
           EXPECT_EQ(ranks[rank].gpu_name, absl::StrCat("GPU ", rank));
           EXPECT_EQ(ranks[rank].num_multiprocessors, 100 + rank);
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
