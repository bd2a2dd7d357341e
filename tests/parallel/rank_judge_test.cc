#include "parallel/rank_judge.h"

#include <gtest/gtest.h>

#include "parallel/rank_progress.h"

namespace lockstep {
namespace {

bool Holds(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

using std::chrono::duration_cast;

RankJudge::Time At(double seconds) {
  return RankJudge::Time() +
         duration_cast<RankJudge::Time::duration>(std::chrono::duration<double>(1000 + seconds));
}

ProgressRecord Place(int64_t entered, int64_t passed) {
  ProgressRecord record;
  record.step = 57;
  record.phase = RankPhase::kDecode;
  record.entered = entered;
  record.passed = passed;
  record.entered_in_step = entered - 100;
  record.kind = CollectiveKind::kAllReduce;
  record.bytes = 8192;
  return record;
}

// Three ranks and a limit of 10 s, judged by rank 0.
class RankJudgeTest : public ::testing::Test {
 protected:
  // All ranks say the same as before, once a second.
  void Repeat(double from, double to) {
    for (double t = from; t < to; t += 1) {
      for (int rank = 0; rank < 3; ++rank) judge_.Hear(rank, judge_.record(rank), At(t));
    }
  }
  std::string TextAt(double seconds) {
    const auto fault = judge_.Judge(At(seconds));
    return fault.has_value() ? fault->text : "";
  }

  RankJudge judge_{{{"a", 1}, {"b", 2}, {"c", 3}}, std::chrono::seconds(10), true};
};

TEST_F(RankJudgeTest, NamesTheRankThatDidNotReachWhereOthersWait) {
  judge_.Hear(0, Place(113, 112), At(0));
  judge_.Hear(1, Place(112, 112), At(0));
  judge_.Hear(2, Place(113, 112), At(0));
  Repeat(1, 9.5);
  EXPECT_EQ(TextAt(9.9), "");
  Repeat(9.5, 10);
  const auto fault = judge_.Judge(At(10));
  ASSERT_TRUE(fault.has_value());
  EXPECT_EQ(fault->kind, FaultKind::kStuck);
  EXPECT_EQ(fault->rank, 1);
  EXPECT_EQ(fault->text,
            "rank 1 (b) in step 57 (decode): no progress for 10.0 s; it has not reached collective "
            "13 of the step (sum of 8192 bytes), in which ranks 0, 2 wait");
}

TEST_F(RankJudgeTest, NamesAllOfSeveral) {
  judge_.Hear(0, Place(113, 112), At(0));
  judge_.Hear(1, Place(112, 112), At(0));
  judge_.Hear(2, Place(112, 112), At(0));
  Repeat(1, 10);
  EXPECT_PRED2(Holds, TextAt(10), "in which rank 0 waits (so ranks 1, 2)");
}

TEST_F(RankJudgeTest, SaysThatAllWaitInTheSameCollective) {
  for (int rank = 0; rank < 3; ++rank) judge_.Hear(rank, Place(113, 112), At(0));
  Repeat(1, 10);
  EXPECT_PRED2(Holds, TextAt(10), "all ranks wait in collective 13 of the step (sum of 8192");
}

TEST_F(RankJudgeTest, SaysWhoDidNotLeaveACollective) {
  judge_.Hear(0, Place(113, 113), At(0));
  judge_.Hear(1, Place(113, 112), At(0));
  judge_.Hear(2, Place(113, 113), At(0));
  Repeat(1, 10);
  EXPECT_PRED2(Holds, TextAt(10),
               ("rank 1 (b) in step 57 (decode): no progress for 10.0 s; it "
                "has not left collective 13 of the step (sum of 8192 bytes), "
                "which ranks 0, 2 have passed"));
}

TEST_F(RankJudgeTest, NobodyInACollective) {
  for (int rank = 0; rank < 3; ++rank) judge_.Hear(rank, Place(113, 113), At(0));
  Repeat(1, 10);
  EXPECT_PRED2(Holds, TextAt(10), "on any rank; 0 steps have landed, the last collective was");
}

TEST_F(RankJudgeTest, MarksOfTheSlowestRankAreProgress) {
  judge_.Hear(0, Place(113, 112), At(0));
  judge_.Hear(2, Place(113, 112), At(0));
  ProgressRecord slow = Place(112, 112);
  for (double t = 0; t < 100; t += 5) {
    slow.marks += 1 << 20;
    judge_.Hear(1, slow, At(t));
    judge_.Hear(0, judge_.record(0), At(t));
    judge_.Hear(2, judge_.record(2), At(t));
    EXPECT_EQ(TextAt(t + 4.9), "") << t;
  }
}

TEST_F(RankJudgeTest, MarksOfARankThatIsAheadAreNone) {
  judge_.Hear(0, Place(113, 113), At(0));
  judge_.Hear(1, Place(112, 112), At(0));
  judge_.Hear(2, Place(113, 112), At(0));
  for (double t = 1; t < 10; t += 1) {
    Repeat(t, t + 0.5);
    ProgressRecord ahead = judge_.record(0);
    ++ahead.marks;
    judge_.Hear(0, ahead, At(t));
  }
  EXPECT_PRED2(Holds, TextAt(10), "rank 1 (b)");
}

// It writes to somebody who does not read, or waits for requests.
TEST_F(RankJudgeTest, ARankThatPausesHangsNot) {
  ProgressRecord pauses = Place(112, 112);
  pauses.paused = 1;
  judge_.Hear(0, pauses, At(0));
  judge_.Hear(1, Place(113, 112), At(0));
  judge_.Hear(2, Place(113, 112), At(0));
  Repeat(1, 100);
  EXPECT_EQ(TextAt(100), "");
  // It goes on, and the others have a whole limit from then on, though they stood still for long.
  judge_.Hear(0, Place(113, 112), At(100));
  EXPECT_EQ(TextAt(100.1), "");
  judge_.Hear(0, Place(113, 113), At(100.2));
  EXPECT_EQ(TextAt(100.3), "");
  Repeat(101, 111);
  EXPECT_PRED2(Holds, TextAt(111), "rank 1 (b)");
}

TEST_F(RankJudgeTest, NamesTheRankThatIsSilent) {
  for (int rank = 0; rank < 3; ++rank) judge_.Hear(rank, Place(113, 112), At(0));
  judge_.Hear(2, Place(112, 112), At(1));
  for (double t = 1; t < 12; t += 1) {
    for (int rank = 0; rank < 2; ++rank) judge_.Hear(rank, judge_.record(rank), At(t));
    EXPECT_EQ(TextAt(std::min(t, 10.9)), "") << t;
  }
  const auto fault = judge_.Judge(At(11));
  ASSERT_TRUE(fault.has_value());
  EXPECT_EQ(fault->kind, FaultKind::kSilent);
  EXPECT_EQ(fault->text, "rank 2 (c) in step 57 (decode): it has not answered for 10.0 s");
}

TEST_F(RankJudgeTest, ALateListenerAccusesNobody) {
  for (int rank = 0; rank < 3; ++rank) judge_.Hear(rank, Place(113, 112), At(0));
  judge_.StartAnew(At(50));
  EXPECT_EQ(TextAt(50), "");
  EXPECT_EQ(TextAt(59.9), "");
  EXPECT_NE(TextAt(60), "");
}

TEST_F(RankJudgeTest, OfARankThatHasLeftNothingIsExpected) {
  for (int rank = 0; rank < 3; ++rank) judge_.Hear(rank, Place(113, 112), At(0));
  judge_.Leave(1);
  for (double t = 1; t < 20; t += 1) {
    judge_.Hear(0, Place(113 + static_cast<int64_t>(t), 113), At(t));
    judge_.Hear(2, Place(113 + static_cast<int64_t>(t), 113), At(t));
  }
  EXPECT_EQ(TextAt(20), "");
}

TEST(RankJudge, WithoutProgressOnlySilenceCounts) {
  RankJudge judge({{"a", 1}, {"b", 2}}, std::chrono::seconds(10), /*judges_progress=*/false);
  for (double t = 0; t < 100; t += 1) judge.Hear(0, Place(113, 112), At(t));
  EXPECT_FALSE(judge.Judge(At(100)).has_value());
  EXPECT_TRUE(judge.Judge(At(109)).has_value());
}

TEST(RankJudge, OneRankAlone) {
  RankJudge judge({{"a", 1}}, std::chrono::seconds(10), true);
  for (double t = 0; t < 10; t += 1) judge.Hear(0, Place(113, 112), At(t));
  const auto fault = judge.Judge(At(10));
  ASSERT_TRUE(fault.has_value());
  EXPECT_PRED2(Holds, fault->text, "no progress for 10.0 s in collective 13 of the step");
  EXPECT_EQ(fault->text.find("all ranks"), std::string::npos) << fault->text;
}

TEST(RankProgress, CountsCollectivesOfTheStep) {
  RankProgress progress;
  progress.SetPhase(RankPhase::kLoad);
  EXPECT_EQ(PhaseText(progress.Read()), "while loading, before step 1");
  progress.Enter(CollectiveKind::kBarrier, 0);
  EXPECT_TRUE(progress.Read().in_collective());
  EXPECT_EQ(CollectiveText(progress.Read()), "collective 1 of the job (barrier)");
  progress.Pass();
  progress.BeginStep(3, RankPhase::kPrefill);
  progress.Enter(CollectiveKind::kBroadcast, 1);
  const ProgressRecord record = progress.Read();
  EXPECT_EQ(PhaseText(record), "in step 3 (prefill)");
  EXPECT_EQ(CollectiveText(record), "collective 1 of the step (broadcast of 1 byte)");
  EXPECT_EQ(record.entered, 2);
  {
    const ProgressPause outer(progress), inner(progress);
    EXPECT_EQ(progress.Read().paused, 2);
  }
  EXPECT_EQ(progress.Read().paused, 0);
}

}  // namespace
}  // namespace lockstep
