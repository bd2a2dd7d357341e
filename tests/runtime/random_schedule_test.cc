// Hundreds of random request mixes: whatever the schedule does, a request gets the ids and the log
// probabilities that it gets alone.
#include "tests/runtime/random_schedule.h"

#include <gtest/gtest.h>

namespace lockstep {
namespace {

constexpr int kMixesPerRankCount = 100;

class RandomScheduleTest : public testing::TestWithParam<int> {};

TEST_P(RandomScheduleTest, EveryRequestGetsWhatItGetsAlone) {
  const int num_ranks = GetParam();
  SchedulerStats sums;
  for (int mix = 0; mix < kMixesPerRankCount; ++mix) {
    Draw draw(static_cast<uint32_t>(mix));
    std::vector<Drawn> together = draw.Requests();
    const EngineOptions options = draw.Options();
    std::vector<Drawn> alone = together;
    std::vector<Drawn> one_rank = together;
    EngineOptions roomy;
    roomy.max_model_len = kMixMaxModelLen;
    roomy.enable_prefix_caching = false;
    ExpectOk(RunEngine(MixConfig(), roomy, num_ranks,
                       [&](Engine& engine) { return RunAlone(engine, alone); }));
    ExpectOk(RunEngine(MixConfig(), roomy, 1,
                       [&](Engine& engine) { return RunAlone(engine, one_rank); }));
    ExpectOk(RunEngine(MixConfig(), options, num_ranks, [&](Engine& engine) -> absl::Status {
      LOCKSTEP_RETURN_IF_ERROR(RunTogether(engine, together, static_cast<uint32_t>(mix)));
      const SchedulerStats stats = engine.stats().scheduler;
      EXPECT_EQ(stats.num_free_blocks, options.num_gpu_blocks_override);
      sums.num_preemptions += stats.num_preemptions;
      sums.prefix_cache_hit_tokens += stats.prefix_cache_hit_tokens;
      return absl::OkStatus();
    }));
    for (size_t i = 0; i < alone.size(); ++i) {
      const std::string what = absl::StrFormat("mix %d, request %d", mix, i);
      ExpectSame(together[i], alone[i], what);
      for (size_t c = 0; c < alone[i].results.size(); ++c) {
        EXPECT_EQ(alone[i].results[c].tokens, one_rank[i].results[c].tokens) << what;
      }
    }
    if (HasFailure()) return;
  }
  EXPECT_GT(sums.num_preemptions, 50) << "the test is blind for preemption";
  EXPECT_GT(sums.prefix_cache_hit_tokens, 1000) << "the test is blind for prefix hits";
}

INSTANTIATE_TEST_SUITE_P(Ranks, RandomScheduleTest, testing::Values(1, 2, 3));

}  // namespace
}  // namespace lockstep
