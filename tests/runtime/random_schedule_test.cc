// Hundreds of random request mixes: whatever the schedule does, a request gets the ids and the log
// probabilities that it gets alone.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <random>

#include "runtime/engine.h"
#include "tests/runtime/engine_test_util.h"

namespace lockstep {
namespace {

constexpr int kMixesPerRankCount = 100;
constexpr int64_t kMaxModelLen = 100;

ModelConfig Config() {
  ModelConfig config = TinyConfig();
  config.eos_token_ids = {3, 30, 60};
  return config;
}

struct Drawn {
  Request request;  // without callbacks
  bool cancelled = false;
  std::vector<Result> results;  // by choice
};

class Draw {
 public:
  explicit Draw(uint32_t seed) : random_(seed) {}

  int64_t Int(int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random_);
  }
  bool OneIn(int64_t n) { return Int(1, n) == 1; }
  template <typename T>
  T Pick(std::initializer_list<T> values) {
    return *(values.begin() + Int(0, std::ssize(values) - 1));
  }
  std::vector<int32_t> Tokens(int64_t count) {
    std::vector<int32_t> tokens(static_cast<size_t>(count));
    for (int32_t& token : tokens) token = static_cast<int32_t>(Int(0, 100));
    return tokens;
  }

  SamplingParams Sampling() {
    SamplingParams sampling;
    // The logits of the tiny model are small: low temperatures make them matter.
    sampling.temperature = Pick({0.0, 0.0, 0.02, 0.1, 1.0});
    sampling.top_p = Pick({1.0, 1.0, 0.9, 0.5});
    sampling.top_k = Pick<int64_t>({0, 0, 5, 40});
    sampling.min_p = Pick({0.0, 0.0, 0.1});
    sampling.repetition_penalty = Pick({1.0, 1.0, 1.3, 0.8});
    sampling.frequency_penalty = Pick({0.0, 0.0, 0.2, -0.1});
    sampling.presence_penalty = Pick({0.0, 0.0, 0.3});
    if (OneIn(4)) sampling.logit_bias = {{7, 0.3}, {static_cast<int32_t>(Int(50, 100)), -100}};
    sampling.seed = static_cast<uint64_t>(Int(0, 3));
    sampling.max_tokens = OneIn(2) ? Int(20, 60) : Int(1, 20);
    sampling.min_tokens = OneIn(4) ? Int(0, sampling.max_tokens) : 0;
    sampling.ignore_eos = OneIn(3);
    if (OneIn(4)) sampling.stop_token_ids = Tokens(3);
    if (OneIn(3)) sampling.num_logprobs = static_cast<int32_t>(Int(0, 4));
    if (OneIn(6)) sampling.num_prompt_logprobs = static_cast<int32_t>(Int(0, 3));
    if (OneIn(5)) sampling.n = static_cast<int32_t>(Int(2, 4));
    return sampling;
  }

  std::vector<Drawn> Requests() {
    std::vector<std::vector<int32_t>> prefixes;
    for (int i = 0; i < 2; ++i) prefixes.push_back(Tokens(Int(1, 40)));
    std::vector<Drawn> drawn(static_cast<size_t>(Int(2, 12)));
    for (Drawn& one : drawn) {
      std::vector<int32_t> prompt;
      if (OneIn(2)) prompt = prefixes[static_cast<size_t>(Int(0, 1))];
      const std::vector<int32_t> rest = Tokens(Int(1, 25));
      prompt.insert(prompt.end(), rest.begin(), rest.end());
      one.request.prompt = prompt;
      one.request.sampling = Sampling();
      one.request.priority = static_cast<int32_t>(Int(0, 2));
      one.request.cache_salt = OneIn(5) ? "salt" : "";
      one.cancelled = OneIn(8);
      one.results.resize(static_cast<size_t>(one.request.sampling.n));
    }
    return drawn;
  }

  EngineOptions Options() {
    EngineOptions options;
    options.max_model_len = kMaxModelLen;
    options.block_size = 4;
    options.max_num_batched_tokens = Pick<int64_t>({1, 8, 16, 64, 2048});
    options.max_num_seqs = Pick<int64_t>({1, 4, 8, 8});
    // From one whole sequence on: most mixes do not fit.
    options.num_gpu_blocks_override = Int(kMaxModelLen / 4, kMaxModelLen / 4 + 8);
    options.enable_prefix_caching = !OneIn(4);
    options.steps_in_flight = static_cast<int>(Int(1, 2));
    options.poison_freed_blocks = true;
    return options;
  }

 private:
  std::mt19937 random_;
};

Request WithCallbacks(Drawn& drawn) {
  Request request =
      RecordedChoices(drawn.request.prompt, drawn.request.sampling, drawn.results.data());
  request.priority = drawn.request.priority;
  request.cache_salt = drawn.request.cache_salt;
  return request;
}

// Each request by itself, with room for everything.
absl::Status RunAlone(Engine& engine, std::vector<Drawn>& drawn) {
  for (Drawn& one : drawn) {
    LOCKSTEP_RETURN_IF_ERROR(engine.Submit(WithCallbacks(one)).status());
    LOCKSTEP_RETURN_IF_ERROR(engine.RunUntilIdle());
  }
  return absl::OkStatus();
}

// All together; new ones come, and some are cancelled, when others have got so many tokens.
absl::Status RunTogether(Engine& engine, std::vector<Drawn>& drawn, uint32_t seed) {
  Draw draw(seed);
  std::vector<RequestId> ids(drawn.size(), 0);
  size_t next = 0;
  absl::Status submitted;
  std::function<void()> submit_next = [&] {
    const size_t i = next++;
    Request request = WithCallbacks(drawn[i]);
    request.on_event = [&, record = request.on_event](const RequestEvent& event) {
      if (next < drawn.size() && draw.OneIn(3)) submit_next();
      for (size_t j = 0; j < next; ++j) {
        if (drawn[j].cancelled && draw.OneIn(10)) engine.Cancel(ids[j]);
      }
      return record(event);
    };
    const auto id = engine.Submit(std::move(request));
    if (!id.ok()) submitted = id.status();
    ids[i] = id.value_or(0);
  };
  while (next < drawn.size()) {
    submit_next();
    LOCKSTEP_RETURN_IF_ERROR(submitted);
    if (draw.OneIn(3)) LOCKSTEP_RETURN_IF_ERROR(engine.RunUntilIdle());
  }
  return engine.RunUntilIdle();
}

void ExpectSame(const Drawn& together, const Drawn& alone, const std::string& what) {
  for (size_t i = 0; i < alone.results.size(); ++i) {
    const Result& got = together.results[i];
    const Result& expected = alone.results[i];
    SCOPED_TRACE(what + absl::StrFormat(", choice %d", i));
    ASSERT_EQ(got.num_final_events, 1);
    if (got.finish == FinishReason::kCancelled) {
      EXPECT_TRUE(together.cancelled);
      ASSERT_LE(got.tokens.size(), expected.tokens.size());
      EXPECT_TRUE(std::equal(got.tokens.begin(), got.tokens.end(), expected.tokens.begin()));
      EXPECT_TRUE(std::equal(got.logprobs.begin(), got.logprobs.end(), expected.logprobs.begin()));
      continue;
    }
    EXPECT_EQ(got.tokens, expected.tokens);
    EXPECT_EQ(got.finish, expected.finish);
    EXPECT_EQ(got.stop_token, expected.stop_token);
    EXPECT_EQ(got.error, expected.error);
    EXPECT_TRUE(got.logprobs == expected.logprobs);
    EXPECT_TRUE(got.prompt_logprobs == expected.prompt_logprobs);
    const SamplingParams& sampling = alone.request.sampling;
    EXPECT_EQ(got.logprobs.size(), sampling.num_logprobs ? got.tokens.size() : 0);
    EXPECT_EQ(got.prompt_logprobs.size(),
              sampling.num_prompt_logprobs && i == 0 ? alone.request.prompt.size() - 1 : 0);
  }
}

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
    roomy.max_model_len = kMaxModelLen;
    roomy.enable_prefix_caching = false;
    ExpectOk(RunEngine(Config(), roomy, num_ranks,
                       [&](Engine& engine) { return RunAlone(engine, alone); }));
    ExpectOk(
        RunEngine(Config(), roomy, 1, [&](Engine& engine) { return RunAlone(engine, one_rank); }));
    ExpectOk(RunEngine(Config(), options, num_ranks, [&](Engine& engine) -> absl::Status {
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
