#include "runtime/core/progress.h"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "runtime/core/phase_times.h"

namespace lockstep {
namespace {

TEST(Progress, SaysHowFarAndHowFast) {
  EXPECT_EQ(ProgressText("reading weights", 3'000'000'000, 15'200'000'000, 0.5),
            "reading weights: 20%, 3.0 of 15.2 GB, 6.0 GB/s");
  EXPECT_EQ(ProgressText("x", 0, 0, 1), "x: 100%, 0.0 of 0.0 GB, 0.0 GB/s");
}

TEST(Progress, ThreadsMayAddAtOnce) {
  testing::internal::CaptureStderr();  // no terminal: nothing is shown
  {
    ProgressLine line("reading", 4000);
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&line] {
        for (int i = 0; i < 1000; ++i) line.Add(1);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
}

TEST(PhaseTimes, NamesWhatTookLongInOrder) {
  PhaseTimes times;
  EXPECT_EQ(times.ToString(), "nothing took long");
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  times.End("first");
  times.End("nothing");
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  times.End("third");
  const std::string text = times.ToString();
  EXPECT_EQ(text.find("first 0.0"), 0u) << text;
  EXPECT_EQ(text.find("nothing"), std::string::npos) << text;
  EXPECT_NE(text.find(" s, third 0.0"), std::string::npos) << text;
  EXPECT_GE(times.total_seconds(), 0.04);
}

}  // namespace
}  // namespace lockstep
