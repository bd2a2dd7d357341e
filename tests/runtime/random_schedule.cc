#include "tests/runtime/random_schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>

namespace lockstep {

ModelConfig MixConfig() {
  ModelConfig config = TinyConfig();
  config.eos_token_ids = {3, 30, 60};
  return config;
}

namespace {

Request WithCallbacks(Drawn& drawn) {
  Request request =
      RecordedChoices(drawn.request.prompt, drawn.request.sampling, drawn.results.data());
  request.priority = drawn.request.priority;
  request.cache_salt = drawn.request.cache_salt;
  return request;
}

}  // namespace

absl::Status RunAlone(Engine& engine, std::vector<Drawn>& drawn) {
  for (Drawn& one : drawn) {
    LOCKSTEP_RETURN_IF_ERROR(engine.Submit(WithCallbacks(one)).status());
    LOCKSTEP_RETURN_IF_ERROR(engine.RunUntilIdle());
  }
  return absl::OkStatus();
}

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

bool SameLogprobs(const std::vector<PositionLogprobs>& a, const std::vector<PositionLogprobs>& b,
                  float tolerance) {
  const auto near = [&](const TokenLogprob& x, const TokenLogprob& y) {
    return x.logprob == y.logprob || std::abs(x.logprob - y.logprob) <= tolerance;
  };
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [&](const auto& x, const auto& y) {
    // The order of the top tokens may differ where they are near.
    return x.token.id == y.token.id && near(x.token, y.token) &&
           std::equal(x.top.begin(), x.top.end(), y.top.begin(), y.top.end(), near);
  });
}

bool SameChoice(const Result& together, const Result& alone, float tolerance) {
  if (together.num_final_events != 1) return false;
  if (together.finish == FinishReason::kCancelled) {
    return together.tokens.size() <= alone.tokens.size() &&
           std::equal(together.tokens.begin(), together.tokens.end(), alone.tokens.begin());
  }
  return together.tokens == alone.tokens && together.finish == alone.finish &&
         together.stop_token == alone.stop_token && together.error == alone.error &&
         SameLogprobs(together.logprobs, alone.logprobs, tolerance) &&
         SameLogprobs(together.prompt_logprobs, alone.prompt_logprobs, tolerance);
}

}  // namespace lockstep
