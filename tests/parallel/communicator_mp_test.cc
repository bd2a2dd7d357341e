// Runs under mpirun: every rank runs the same tests, rank 0 prints, and the exit status is not 0 on
// any rank where a test failed on one.
#include <mpi.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "gtest/gtest.h"
#include "parallel/mpi_collectives.h"
#include "parallel/mpi_communicator.h"
#include "tests/parallel/collectives_checks.h"

namespace lockstep {
namespace {

Communicator* job = nullptr;

// Others may be inside a collective that the failed rank will never enter: the job ends.
void RunOrAbort(absl::Status (*check)(Communicator&)) {
  const absl::Status status = check(*job);
  if (status.ok()) return;
  std::fprintf(stderr, "rank %d: %s\n", job->rank(), status.ToString().c_str());
  AbortJob(1);
}

TEST(MpiCommunicatorTest, AllReduceSum) { RunOrAbort(CheckAllReduceSum); }
TEST(MpiCommunicatorTest, Gathers) { RunOrAbort(CheckGathers); }
TEST(MpiCommunicatorTest, Broadcast) { RunOrAbort(CheckBroadcast); }
TEST(MpiCommunicatorTest, Mixture) { RunOrAbort(CheckMixture); }
TEST(MpiCommunicatorTest, Agree) { RunOrAbort(CheckAgree); }

// MPI with messages cut into small pieces, as those above 2^30 bytes are.
class ShortMessages : public Communicator {
 public:
  explicit ShortMessages(Communicator& job)
      : job_(job), mpi_(MPI_COMM_WORLD, job.rank(), job.size(), 40000) {}

  int rank() const override { return job_.rank(); }
  int size() const override { return job_.size(); }
  std::string host() const override { return job_.host(); }
  int ranks_on_host() const override { return job_.ranks_on_host(); }
  int first_rank_on_host() const override { return job_.first_rank_on_host(); }
  absl::Status AllReduceSum(float* data, int64_t count) override {
    return mpi_.AllReduceSum(data, count);
  }
  absl::Status AllGather(const void* send, int64_t bytes, void* recv) override {
    return mpi_.AllGatherV(send, std::vector<int64_t>(size(), bytes), recv);
  }
  absl::Status AllGatherV(const void* send, std::span<const int64_t> bytes, void* recv) override {
    return mpi_.AllGatherV(send, bytes, recv);
  }
  absl::Status GatherV(const void* send, std::span<const int64_t> bytes, void* recv,
                       int root) override {
    return mpi_.GatherV(send, bytes, recv, root);
  }
  absl::Status Broadcast(void* data, int64_t bytes, int root) override {
    return mpi_.Broadcast(data, bytes, root);
  }
  absl::Status Barrier() override { return mpi_.Barrier(); }

 private:
  Communicator& job_;
  MpiCollectives mpi_;
};

TEST(MpiCommunicatorTest, LongMessagesGoInPieces) {
  int initialized = 0;
  MPI_Initialized(&initialized);
  if (initialized == 0) GTEST_SKIP() << "started without a launcher: no MPI";
  RunOrAbort([](Communicator& job) -> absl::Status {
    ShortMessages communicator(job);
    LOCKSTEP_RETURN_IF_ERROR(CheckAllReduceSum(communicator));
    LOCKSTEP_RETURN_IF_ERROR(CheckGathers(communicator));
    return CheckBroadcast(communicator);
  });
}

TEST(MpiCommunicatorTest, LauncherAndCommunicatorCountAlike) {
  if (const char* size = std::getenv("OMPI_COMM_WORLD_SIZE")) {
    EXPECT_EQ(job->size(), atoi(size));
  }
  if (const char* size = std::getenv("OMPI_COMM_WORLD_LOCAL_SIZE")) {
    EXPECT_EQ(job->ranks_on_host(), atoi(size));
    if (atoi(size) == job->size()) {
      EXPECT_EQ(job->first_rank_on_host(), 0);
    }
    EXPECT_LE(job->first_rank_on_host(), job->rank());
  }
  EXPECT_FALSE(job->host().empty());
}

TEST(MpiCommunicatorTest, IdleRanksBurnNoCore) {
  const auto cpu_ms = [] {
    timespec cpu = {};
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &cpu);
    return cpu.tv_sec * 1000.0 + cpu.tv_nsec / 1e6;
  };
  ASSERT_TRUE(job->Barrier().ok());
  const double before = cpu_ms();
  if (job->rank() == 0) usleep(2000000);
  char byte = 0;
  ASSERT_TRUE(job->Broadcast(&byte, 1, 0).ok());
  const double used = cpu_ms() - before;
  EXPECT_LT(used, 300) << "ms of CPU in 2 s";
  std::vector<double> all(job->size());
  ASSERT_TRUE(job->AllGather(&used, sizeof(used), all.data()).ok());
  RecordProperty("idle_cpu_ms", absl::StrCat(*std::max_element(all.begin(), all.end())));
  if (job->rank() == 0) {
    std::printf("CPU of an idle rank: %.2f %%\n", *std::max_element(all.begin(), all.end()) / 20);
  }
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  auto communicator = lockstep::CreateMpiCommunicator();
  if (!communicator.ok()) {
    std::fprintf(stderr, "%s\n", communicator.status().ToString().c_str());
    return 1;
  }
  lockstep::job = communicator->get();
  auto& listeners = testing::UnitTest::GetInstance()->listeners();
  if (lockstep::job->rank() != 0) delete listeners.Release(listeners.default_result_printer());
  const int64_t failed = RUN_ALL_TESTS();
  std::vector<int64_t> all(lockstep::job->size());
  const absl::Status gathered = lockstep::job->AllGather(&failed, sizeof(failed), all.data());
  if (!gathered.ok()) return 1;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank] == 0) continue;
    if (lockstep::job->rank() == 0) std::fprintf(stderr, "a test failed on rank %zu\n", rank);
    return 1;
  }
  return 0;
}
