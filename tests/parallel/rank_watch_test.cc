#include "parallel/rank_watch.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <future>
#include <string>
#include <thread>

#include "parallel/local_communicator.h"
#include "parallel/process_fate.h"
#include "parallel/watched_communicator.h"

namespace lockstep {
namespace {

bool Holds(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

using std::chrono::milliseconds;
using std::chrono::seconds;

// What a rank's watch has said: written by its thread, read after WaitForEnd.
struct Heard {
  std::vector<std::string> reports;
  std::promise<bool> ended;  // told
  bool WaitForEnd() {
    auto future = ended.get_future();
    EXPECT_EQ(future.wait_for(seconds(20)), std::future_status::ready);
    return future.get();
  }
};

RankWatchOptions Options(Heard& heard, std::chrono::duration<double> limit) {
  RankWatchOptions options;
  options.limit = limit;
  options.report = [&heard](const RankFault& fault) { heard.reports.push_back(fault.text); };
  options.end = [&heard](const RankFault&, bool told) { heard.ended.set_value(told); };
  return options;
}

// One rank of a job whose ranks are threads.
struct WatchedThread {
  Communicator& communicator;
  WatchedRank watched = {};
  Heard heard = {};
  std::unique_ptr<RankWatch> watch = nullptr;

  absl::Status Start(std::chrono::duration<double> limit) {
    LOCKSTEP_ASSIGN_OR_RETURN(watch,
                              RankWatch::Create(communicator, watched, Options(heard, limit)));
    return absl::OkStatus();
  }
};

void ExpectOk(const std::vector<absl::Status>& statuses) {
  for (const absl::Status& status : statuses) EXPECT_TRUE(status.ok()) << status;
}

TEST(RankWatch, AGoodbyeIsNoDeath) {
  ExpectOk(RunLocalRanks(3, [](Communicator& communicator) -> absl::Status {
    WatchedThread rank{communicator};
    LOCKSTEP_RETURN_IF_ERROR(rank.Start(seconds(30)));
    // Rank 0 first, then one of the others; what remains hears nothing of it.
    std::this_thread::sleep_for(milliseconds(100) * communicator.rank());
    rank.watch.reset();
    EXPECT_TRUE(rank.heard.reports.empty());
    return communicator.Barrier();
  }));
}

// A rank that only connects, and then is gone.
absl::Status Vanish(Communicator& communicator) {
  std::vector<char> names(static_cast<size_t>(communicator.size()) *
                          (256 + sizeof(ProcessIdentity)));
  std::vector<char> mine(256 + sizeof(ProcessIdentity));
  LOCKSTEP_RETURN_IF_ERROR(communicator.AllGather(mine.data(), std::ssize(mine), names.data()));
  LOCKSTEP_ASSIGN_OR_RETURN(const auto star, RankStar::Connect(communicator));
  return Agree(communicator, absl::OkStatus());
}

TEST(RankWatch, OneRankSpeaksWhenAnotherIsGone) {
  for (const int gone : {0, 1, 2}) {
    std::atomic<int> reports = 0;
    ExpectOk(RunLocalRanks(3, [&](Communicator& communicator) -> absl::Status {
      if (communicator.rank() == gone) {
        LOCKSTEP_RETURN_IF_ERROR(Vanish(communicator));
        return communicator.Barrier();
      }
      WatchedThread rank{communicator};
      LOCKSTEP_RETURN_IF_ERROR(rank.Start(seconds(30)));
      const int speaker = gone == 0 ? 1 : 0;
      // Rank 0's word ends the others. Where it is gone they speak by turns: in a process the abort
      // of the first ends the rest before.
      const bool told =
          gone != 0 || communicator.rank() == speaker ? rank.heard.WaitForEnd() : true;
      EXPECT_EQ(told, communicator.rank() != speaker) << communicator.rank();
      if (communicator.rank() == speaker) {
        EXPECT_EQ(rank.heard.reports.size(), 1u);
        EXPECT_PRED2(Holds, rank.heard.reports.at(0), absl::StrFormat("rank %d (", gone));
        EXPECT_PRED2(Holds, rank.heard.reports.at(0), " at the start: its process ");
        EXPECT_TRUE(rank.watched.links.stopped());
        ++reports;
      }
      rank.watch.reset();
      return communicator.Barrier();
    }));
    EXPECT_EQ(reports, 1) << gone;
  }
}

TEST(RankWatch, AnErrorOfARankIsToldByRank0Alone) {
  for (const int failing : {0, 2}) {
    ExpectOk(RunLocalRanks(3, [&](Communicator& communicator) -> absl::Status {
      WatchedThread rank{communicator};
      LOCKSTEP_RETURN_IF_ERROR(rank.Start(seconds(30)));
      rank.watched.progress.BeginStep(7, RankPhase::kPrefill);
      if (communicator.rank() == failing) rank.watch->Fail(absl::InternalError("out of luck"));
      // What follows from it is not told, though it may come first.
      if (communicator.rank() == 0) rank.watch->Fail(absl::AbortedError("a rank left"));
      EXPECT_EQ(rank.heard.WaitForEnd(), communicator.rank() != 0);
      if (communicator.rank() == 0) {
        EXPECT_EQ(rank.heard.reports.size(), 1u);
        EXPECT_PRED2(Holds, rank.heard.reports.at(0), absl::StrFormat("rank %d (", failing));
        EXPECT_PRED2(Holds, rank.heard.reports.at(0), " in step 7 (prefill): out of luck");
      } else {
        EXPECT_TRUE(rank.heard.reports.empty());
      }
      rank.watch.reset();
      return communicator.Barrier();
    }));
  }
}

TEST(RankWatch, AnErrorThatFollowsIsToldWhereThereIsNoBetterOne) {
  Heard heard;
  WatchedRank watched;
  const auto alone = CreateLocalCommunicators(1);
  auto watch = RankWatch::Create(*alone[0], watched, Options(heard, seconds(30)));
  ASSERT_TRUE(watch.ok()) << watch.status();
  (*watch)->Fail(absl::AbortedError("a rank left"));
  EXPECT_FALSE(heard.WaitForEnd());
  EXPECT_EQ(heard.reports, std::vector<std::string>{"at the start: a rank left"});
}

TEST(RankWatch, NamesTheRankThatDoesNotReachACollective) {
  ExpectOk(RunLocalRanks(3, [](Communicator& communicator) -> absl::Status {
    WatchedThread rank{communicator};
    LOCKSTEP_RETURN_IF_ERROR(rank.Start(milliseconds(1000)));
    WatchedCommunicator collectives(communicator, rank.watched.progress);
    rank.watched.progress.BeginStep(5, RankPhase::kDecode);
    float sum[4] = {};
    for (int i = 0; i < 3; ++i) LOCKSTEP_RETURN_IF_ERROR(collectives.AllReduceSum(sum, 4));
    bool told = false;
    std::thread stuck;
    if (communicator.rank() != 1) {
      stuck = std::thread([&] { collectives.AllReduceSum(sum, 4).IgnoreError(); });
    }
    told = rank.heard.WaitForEnd();
    if (communicator.rank() == 0) {
      EXPECT_PRED2(Holds, rank.heard.reports.at(0), "rank 1 (");
      EXPECT_PRED2(Holds, rank.heard.reports.at(0), "in step 5 (decode): no progress for 1.");
      EXPECT_PRED2(Holds, rank.heard.reports.at(0),
                   ("it has not reached collective 4 of the step (sum of 16 bytes), in "
                    "which ranks 0, 2 wait"));
    }
    EXPECT_EQ(told, communicator.rank() != 0);
    if (communicator.rank() == 1) LOCKSTEP_RETURN_IF_ERROR(collectives.AllReduceSum(sum, 4));
    if (stuck.joinable()) stuck.join();
    rank.watch.reset();
    return communicator.Barrier();
  }));
}

TEST(RankWatch, AHangOfOneRankAlone) {
  Heard heard;
  WatchedRank watched;
  watched.progress.BeginStep(2, RankPhase::kPrefill);
  const auto alone = CreateLocalCommunicators(1);
  auto watch = RankWatch::Create(*alone[0], watched, Options(heard, milliseconds(500)));
  ASSERT_TRUE(watch.ok()) << watch.status();
  // As long as it marks what it does, it does not hang.
  for (int i = 0; i < 15; ++i) {
    std::this_thread::sleep_for(milliseconds(100));
    watched.progress.Mark(1);
  }
  EXPECT_TRUE(heard.reports.empty());
  EXPECT_FALSE(heard.WaitForEnd());
  EXPECT_PRED2(Holds, heard.reports.at(0), "in step 2 (prefill): no progress for 0.");
}

TEST(ProcessFate, TellsHowAChildEnded) {
  const auto fate = [](auto body) {
    const pid_t child = fork();
    if (child == 0) {
      pause();
      _exit(9);
    }
    ProcessIdentity identity = ProcessOf(child);
    EXPECT_EQ(HowItEnded(identity), "");
    EXPECT_FALSE(IsStopped(identity));
    body(child, identity);
    kill(child, SIGKILL);
    siginfo_t info;
    waitid(P_PID, static_cast<id_t>(child), &info, WEXITED | WNOWAIT);
    const std::string how = HowItEnded(identity);
    ++identity.start_ticks;  // another process that has got its number
    EXPECT_EQ(HowItEnded(identity), "");
    --identity.start_ticks;
    waitpid(child, nullptr, 0);
    EXPECT_EQ(HowItEnded(identity), "");
    return how;
  };
  EXPECT_EQ(fate([](pid_t, const ProcessIdentity&) {}), "was killed by SIGKILL");
  EXPECT_EQ(fate([](pid_t child, const ProcessIdentity& identity) {
              kill(child, SIGSTOP);
              waitpid(child, nullptr, WUNTRACED);
              EXPECT_TRUE(IsStopped(identity));
            }),
            "was killed by SIGKILL");
  const pid_t child = fork();
  if (child == 0) _exit(0);
  siginfo_t info;
  const ProcessIdentity identity = ProcessOf(child);
  waitid(P_PID, static_cast<id_t>(child), &info, WEXITED | WNOWAIT);
  EXPECT_EQ(HowItEnded(identity), "ended with exit status 0");
  waitpid(child, nullptr, 0);
}

}  // namespace
}  // namespace lockstep
