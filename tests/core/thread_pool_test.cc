#include "runtime/core/thread_pool.h"

#include <atomic>
#include <vector>

#include "gtest/gtest.h"

namespace lockstep {
namespace {

TEST(ThreadPoolTest, EveryIndexOnceOnGrainBorders) {
  for (const int threads : {1, 2, 3, 5}) {
    ThreadPool pool(threads);
    for (const int64_t count : {0, 1, 7, 64, 1000}) {
      for (const int64_t grain : {1, 8, 64}) {
        std::vector<std::atomic<int>> seen(static_cast<size_t>(count));
        pool.ParallelFor(count, grain, [&](int64_t begin, int64_t end) {
          EXPECT_EQ(begin % grain, 0);
          for (int64_t i = begin; i < end; ++i) ++seen[static_cast<size_t>(i)];
        });
        for (const auto& hits : seen) EXPECT_EQ(hits, 1);
      }
    }
  }
}

TEST(ThreadPoolTest, ManyShortJobs) {
  ThreadPool pool(3);
  std::atomic<int64_t> total{0};
  for (int job = 0; job < 20000; ++job) {
    pool.ParallelFor(3, 1, [&](int64_t begin, int64_t end) { total += end - begin; });
  }
  EXPECT_EQ(total, 60000);
}

}  // namespace
}  // namespace lockstep
