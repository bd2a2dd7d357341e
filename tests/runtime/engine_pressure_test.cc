// What users reported of other engines under a small KV pool and in a crowd.
#include <gtest/gtest.h>

#include <random>

#include "runtime/engine.h"
#include "tests/runtime/engine_test_util.h"

namespace lockstep {
namespace {

ModelConfig LongConfig(int64_t positions) {
  ModelConfig config = TinyConfig();
  config.max_position_embeddings = positions;
  config.rope.original_max_position_embeddings = positions;
  return config;
}

std::vector<int32_t> MakePrompt(int64_t length, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<int32_t> prompt(static_cast<size_t>(length));
  for (int32_t& t : prompt) t = static_cast<int32_t>(random() % 101);
  return prompt;
}

SamplingParams Greedy(int64_t max_tokens) {
  SamplingParams sampling;
  sampling.temperature = 0;
  sampling.max_tokens = max_tokens;
  return sampling;
}

// A pool smaller than the longest length: what cannot run is refused at once with both numbers, a
// small request is not held up by it, and one that grows to the limit ends there.
TEST(EnginePressureTest, TheEffectiveLimitIsThePools) {
  EngineOptions options;
  options.block_size = 16;
  options.max_model_len = 4096;
  options.num_gpu_blocks_override = 49;
  for (const int num_ranks : {1, 2}) {
    Result refused, small, grown, exact;
    ExpectOk(RunEngine(LongConfig(4096), options, num_ranks, [&](Engine& engine) -> absl::Status {
      EXPECT_EQ(engine.max_model_len(), 784);
      for (const int64_t length : {1000, 784, 785}) {
        const absl::Status status =
            engine.Submit(Recorded(MakePrompt(length, 1), Greedy(1), &refused)).status();
        EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
        EXPECT_NE(std::string(status.message()).find(std::to_string(length)), std::string::npos);
        EXPECT_NE(std::string(status.message()).find("784"), std::string::npos) << status;
      }
      LOCKSTEP_RETURN_IF_ERROR(
          engine.Submit(Recorded(MakePrompt(700, 2), Greedy(200), &grown)).status());
      LOCKSTEP_RETURN_IF_ERROR(
          engine.Submit(Recorded(MakePrompt(5, 3), Greedy(3), &small)).status());
      LOCKSTEP_RETURN_IF_ERROR(
          engine.Submit(Recorded(MakePrompt(783, 4), Greedy(9), &exact)).status());
      return engine.RunUntilIdle();
    }));
    EXPECT_EQ(grown.tokens.size(), 84u);
    EXPECT_EQ(grown.finish, FinishReason::kLength);
    EXPECT_EQ(small.tokens.size(), 3u);
    EXPECT_EQ(exact.tokens.size(), 1u);
    EXPECT_EQ(exact.finish, FinishReason::kLength);
  }
}

// Six requests of 64 + 128 tokens in a pool for about two of them: ids, logprobs and ends as with
// room for all; every token has its logprob, once.
TEST(EnginePressureTest, PreemptionChangesNothing) {
  for (const int num_ranks : {1, 2, 3}) {
    std::vector<Result> results[2] = {std::vector<Result>(7), std::vector<Result>(7)};
    for (const bool pressed : {false, true}) {
      EngineOptions options;
      options.block_size = 16;
      options.max_model_len = 200;
      options.num_gpu_blocks_override = pressed ? 26 : 200;
      ExpectOk(RunEngine(LongConfig(256), options, num_ranks, [&](Engine& engine) -> absl::Status {
        for (uint32_t i = 0; i < 6; ++i) {
          SamplingParams sampling = Greedy(128);
          sampling.num_logprobs = 2;
          if (i == 1) sampling.n = 2;
          if (i == 2) sampling.repetition_penalty = 1.3;
          if (i == 2) sampling.presence_penalty = 0.2;
          if (i >= 3) sampling.temperature = 0.1;
          sampling.seed = i;
          // Choice 1 of request 1 takes the place after it.
          Result* result = &results[pressed][i < 2 ? i : i + 1];
          LOCKSTEP_RETURN_IF_ERROR(
              engine.Submit(RecordedChoices(MakePrompt(64, i), sampling, result)).status());
        }
        LOCKSTEP_RETURN_IF_ERROR(engine.RunUntilIdle());
        const int64_t preemptions = engine.stats().scheduler.num_preemptions;
        EXPECT_EQ(preemptions > 0, pressed) << preemptions;
        return absl::OkStatus();
      }));
    }
    for (size_t i = 0; i < 7; ++i) {
      EXPECT_EQ(results[1][i].tokens.size(), 128u);
      EXPECT_EQ(results[1][i].logprobs.size(), 128u);
      EXPECT_TRUE(results[1][i] == results[0][i]) << "request " << i;
    }
  }
}

// Greedy ids of eight prompts: alone, and beside 24 that sample; whatever the chunks; top_p says
// nothing at temperature 0.
TEST(EnginePressureTest, GreedyIdsDoNotDependOnTheCrowd) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    std::vector<Result> alone(8);
    for (const int64_t chunk : {2048, 16, 64}) {
      EngineOptions options;
      options.dtype = dtype;
      options.max_num_batched_tokens = chunk;
      std::vector<Result> crowd(32);
      ExpectOk(RunEngine(LongConfig(256), options, 2, [&](Engine& engine) -> absl::Status {
        for (uint32_t i = 0; i < 8 && chunk == 2048; ++i) {
          LOCKSTEP_RETURN_IF_ERROR(
              engine.Submit(Recorded(MakePrompt(10 + 9 * i, i), Greedy(40), &alone[i])).status());
          LOCKSTEP_RETURN_IF_ERROR(engine.RunUntilIdle());
        }
        for (uint32_t i = 0; i < 32; ++i) {
          SamplingParams sampling = Greedy(40);
          if (i % 4 == 0) sampling.top_p = 0.9;
          if (i % 4 != 0) sampling.temperature = 0.5;
          const uint32_t prompt = i % 4 == 0 ? i / 4 : 100 + i;
          LOCKSTEP_RETURN_IF_ERROR(
              engine.Submit(Recorded(MakePrompt(10 + 9 * (i / 4), prompt), sampling, &crowd[i]))
                  .status());
        }
        return engine.RunUntilIdle();
      }));
      for (size_t i = 0; i < 8; ++i) EXPECT_EQ(crowd[4 * i].tokens, alone[i].tokens);
    }
  }
}

}  // namespace
}  // namespace lockstep
