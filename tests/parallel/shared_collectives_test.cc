#include "parallel/shared_collectives.h"

#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cstring>

#include "gtest/gtest.h"
#include "parallel/shared_mapping.h"

namespace lockstep {
namespace {

// Two processes: the parent is rank 0, the child runs `child` as rank 1 and ends without any
// destructor.
class TwoProcesses {
 public:
  template <typename Child>
  explicit TwoProcesses(Child child) {
    block_ = *SharedMapping::Create(SharedCollectives::BlockBytes(2));
    SharedCollectives::InitBlock(block_.data(), 2);
    pid_ = fork();
    if (pid_ == 0) {
      const absl::StatusOr<SharedMapping> mine = SharedMapping::Attach(block_.handle());
      if (!mine.ok()) _exit(90);
      auto* ranks_end = new SharedCollectives(mine->data(), 1, 2);
      _exit(child(*ranks_end));
    }
    parent_.reset(new SharedCollectives(block_.data(), 0, 2));
  }
  SharedCollectives& parent() { return *parent_; }
  int ChildExit() {
    int status = 0;
    waitpid(pid_, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }

 private:
  SharedMapping block_;
  pid_t pid_ = 0;
  std::unique_ptr<SharedCollectives> parent_;
};

TEST(SharedCollectivesTest, TwoProcessesSum) {
  const auto sum = [](SharedCollectives& collectives, float first) {
    float data[3] = {first, first + 1, first + 2};
    for (int i = 0; i < 1000; ++i) {
      if (!collectives.AllReduceSum(data, 3).ok()) return -1.0f;
      for (float& x : data) x /= 2;
    }
    return data[0];
  };
  TwoProcesses pair([&](SharedCollectives& c) { return sum(c, 5) == 3.0f ? 7 : 8; });
  EXPECT_EQ(sum(pair.parent(), 1), 3.0f);
  EXPECT_EQ(pair.ChildExit(), 7);
}

TEST(SharedCollectivesTest, ADeadRankIsNoticed) {
  TwoProcesses pair([](SharedCollectives& c) { return c.Barrier().ok() ? 3 : 4; });
  ASSERT_TRUE(pair.parent().Barrier().ok());
  const absl::Status status = pair.parent().Barrier();  // the child is a zombie now
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted);
  EXPECT_NE(status.message().find("rank 1"), absl::string_view::npos) << status;
  EXPECT_NE(status.message().find("died"), absl::string_view::npos) << status;
  EXPECT_EQ(pair.ChildExit(), 3);
}

TEST(SharedCollectivesTest, AWaitingRankSleeps) {
  TwoProcesses pair([](SharedCollectives& c) {
    char byte = 0;
    if (!c.Broadcast(&byte, 1, 0).ok()) return 100;
    timespec cpu = {};
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &cpu);
    return static_cast<int>(cpu.tv_nsec / 10000000);  // hundredths of a second
  });
  usleep(1200000);
  char byte = 1;
  ASSERT_TRUE(pair.parent().Broadcast(&byte, 1, 0).ok());
  EXPECT_LE(pair.ChildExit(), 5);
}

TEST(SharedMappingTest, AttachRefusesOtherMemory) {
  absl::StatusOr<SharedMapping> mapping = SharedMapping::Create(1000);
  ASSERT_TRUE(mapping.ok()) << mapping.status();
  std::memset(mapping->data(), 5, 1000);
  absl::StatusOr<SharedMapping> again = SharedMapping::Attach(mapping->handle());
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(std::memcmp(mapping->data(), again->data(), 1000), 0);

  SharedMappingHandle handle = mapping->handle();
  handle.token ^= 1;
  EXPECT_FALSE(SharedMapping::Attach(handle).ok());
  handle = mapping->handle();
  handle.size_bytes += 1;
  EXPECT_FALSE(SharedMapping::Attach(handle).ok());
  handle = mapping->handle();
  handle.fd = 9999;
  EXPECT_EQ(SharedMapping::Attach(handle).status().code(), absl::StatusCode::kFailedPrecondition);
}

}  // namespace
}  // namespace lockstep
