#include "parallel/local_communicator.h"

#include <atomic>
#include <thread>

#include "gtest/gtest.h"
#include "tests/parallel/collectives_checks.h"

namespace lockstep {
namespace {

class LocalRanks : public testing::TestWithParam<int> {};

void ExpectAllOk(const std::vector<absl::Status>& statuses) {
  for (const absl::Status& status : statuses) EXPECT_TRUE(status.ok()) << status;
}

TEST_P(LocalRanks, AllReduceSum) { ExpectAllOk(RunLocalRanks(GetParam(), CheckAllReduceSum)); }
TEST_P(LocalRanks, Gathers) { ExpectAllOk(RunLocalRanks(GetParam(), CheckGathers)); }
TEST_P(LocalRanks, Broadcast) { ExpectAllOk(RunLocalRanks(GetParam(), CheckBroadcast)); }
TEST_P(LocalRanks, Mixture) { ExpectAllOk(RunLocalRanks(GetParam(), CheckMixture)); }
TEST_P(LocalRanks, Agree) { ExpectAllOk(RunLocalRanks(GetParam(), CheckAgree)); }

INSTANTIATE_TEST_SUITE_P(Sizes, LocalRanks, testing::Values(1, 2, 3, 4, 8, 17));

TEST(LocalCommunicatorTest, ARankThatLeavesAbortsTheOthers) {
  const std::vector<absl::Status> statuses = RunLocalRanks(3, [](Communicator& communicator) {
    if (communicator.rank() == 1) return absl::InternalError("gave up");
    return communicator.Barrier();
  });
  EXPECT_EQ(statuses[1].code(), absl::StatusCode::kInternal);
  for (const int rank : {0, 2}) {
    EXPECT_EQ(statuses[rank].code(), absl::StatusCode::kAborted);
    EXPECT_NE(statuses[rank].message().find("rank 1"), absl::string_view::npos) << statuses[rank];
  }
}

TEST(LocalCommunicatorTest, LeavingAfterTheLastCollectiveHarmsNobody) {
  for (int repeat = 0; repeat < 100; ++repeat) {
    ExpectAllOk(
        RunLocalRanks(4, [](Communicator& communicator) { return communicator.Barrier(); }));
  }
}

TEST(LocalCommunicatorTest, DifferentCollectivesAreAnErrorNotGarbage) {
  const std::vector<absl::Status> statuses = RunLocalRanks(2, [](Communicator& communicator) {
    float data[8] = {};
    return communicator.AllReduceSum(data, communicator.rank() == 0 ? 8 : 4);
  });
  for (const absl::Status& status : statuses) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << status;
  }
}

TEST(LocalCommunicatorTest, BarrierWaitsForAll) {
  std::atomic<int> arrived = 0;
  ExpectAllOk(RunLocalRanks(4, [&](Communicator& communicator) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5 * communicator.rank()));
    ++arrived;
    LOCKSTEP_RETURN_IF_ERROR(communicator.Barrier());
    return arrived == 4 ? absl::OkStatus() : absl::InternalError("passed too early");
  }));
}

}  // namespace
}  // namespace lockstep
