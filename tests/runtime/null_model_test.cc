// The engine without arithmetic: its answers are what null_decoder.h says, whatever the engine does
// to them, and its steps keep their pace.
#include <gtest/gtest.h>

#include <chrono>
#include <random>

#include "model/null_decoder.h"
#include "runtime/engine.h"
#include "tests/runtime/engine_test_util.h"

namespace lockstep {
namespace {

constexpr int64_t kVocabSize = 101;  // TinyConfig's

ModelConfig ConfigWithEnds() {
  ModelConfig config = TinyConfig();
  config.eos_token_ids = {3, 30, 31, 60};
  return config;
}

EngineOptions NullOptions() {
  EngineOptions options;
  options.null_model = true;
  options.block_size = 4;
  options.kv_cache_memory_bytes = 1 << 20;
  return options;
}

std::vector<int32_t> ExpectedAnswer(const std::vector<int32_t>& prompt, size_t length,
                                    const std::vector<int32_t>& ends) {
  uint64_t digest = kNullDigestStart;
  for (const int32_t token : prompt) digest = NullDigest(digest, token);
  std::vector<int32_t> answer;
  while (answer.size() < length) {
    answer.push_back(NullToken(digest, kVocabSize, ends));
    digest = NullDigest(digest, answer.back());
  }
  return answer;
}

// Prompts with common beginnings, some with several choices, more at once than blocks allow.
absl::Status RunCrowd(Engine& engine) {
  constexpr size_t kRequests = 40;
  std::mt19937 random(7);
  std::vector<int32_t> common(30);
  for (int32_t& id : common) id = static_cast<int32_t>(random() % kVocabSize);
  std::vector<std::vector<int32_t>> prompts(kRequests);
  std::vector<std::vector<Result>> results(kRequests);
  std::vector<int> admissions(kRequests);
  for (size_t i = 0; i < kRequests; ++i) {
    prompts[i].assign(common.begin(), common.begin() + static_cast<int64_t>(random() % 30) + 1);
    for (size_t j = random() % 20; j > 0; --j) {
      prompts[i].push_back(static_cast<int32_t>(random() % kVocabSize));
    }
    SamplingParams sampling;
    sampling.temperature = i % 2 == 0 ? 0 : 0.8;
    sampling.max_tokens = 40;
    sampling.n = i % 5 == 0 ? 3 : 1;
    results[i].resize(static_cast<size_t>(sampling.n));
    Request request = RecordedChoices(prompts[i], sampling, results[i].data());
    request.on_admitted = [&admissions, i] { ++admissions[i]; };
    LOCKSTEP_RETURN_IF_ERROR(engine.Submit(std::move(request)).status());
  }
  LOCKSTEP_RETURN_IF_ERROR(engine.RunUntilIdle());
  for (size_t i = 0; i < kRequests; ++i) {
    EXPECT_EQ(admissions[i], 1) << "request " << i;
    for (const Result& result : results[i]) {
      EXPECT_EQ(result.tokens, ExpectedAnswer(prompts[i], 40, ConfigWithEnds().eos_token_ids));
      EXPECT_EQ(result.finish, FinishReason::kLength);
    }
  }
  return absl::OkStatus();
}

TEST(NullModelTest, AnswersFollowFromThePromptWhateverTheEngineDoes) {
  for (int num_ranks = 1; num_ranks <= 3; ++num_ranks) {
    for (const int steps_in_flight : {1, 2}) {
      EngineOptions options = NullOptions();
      options.max_num_batched_tokens = 23;
      options.num_gpu_blocks_override = 60;
      options.steps_in_flight = steps_in_flight;
      options.poison_freed_blocks = true;
      ExpectOk(RunEngine(ConfigWithEnds(), options, num_ranks, [](Engine& engine) -> absl::Status {
        LOCKSTEP_RETURN_IF_ERROR(RunCrowd(engine));
        // Else the test has not tested what it is about.
        EXPECT_GT(engine.stats().scheduler.num_preemptions, 0);
        EXPECT_GT(engine.stats().scheduler.prefix_cache_hit_tokens, 0);
        EXPECT_EQ(engine.stats().scheduler.num_blocks, 60);
        EXPECT_EQ(engine.stats().scheduler.num_free_blocks, 60);
        return absl::OkStatus();
      }));
    }
  }
}

TEST(NullModelTest, StepsKeepTheirPaceAndPhasesAddUp) {
  EngineOptions options = NullOptions();
  options.null_step_seconds = 0.01;
  ExpectOk(RunEngine(TinyConfig(), options, 1, [](Engine& engine) -> absl::Status {
    Result result;
    SamplingParams sampling;
    sampling.max_tokens = 21;
    sampling.ignore_eos = true;
    LOCKSTEP_RETURN_IF_ERROR(engine.Submit(Recorded({1, 2}, sampling, &result)).status());
    const auto start = std::chrono::steady_clock::now();
    LOCKSTEP_RETURN_IF_ERROR(engine.RunUntilIdle());
    const double seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    EXPECT_EQ(result.tokens.size(), 21);
    EXPECT_GE(seconds, 20 * 0.01 - 0.001);
    const StepPhaseSeconds phases = engine.stats().phases;
    for (const double phase : {phases.plan, phases.launch, phases.land, phases.deliver}) {
      EXPECT_GT(phase, 0);
    }
    EXPECT_GE(phases.launch, 0.19);  // this decoder sleeps there
    EXPECT_LE(phases.plan + phases.broadcast + phases.launch + phases.land + phases.deliver,
              seconds);
    return absl::OkStatus();
  }));
}

void ExpectRefused(const EngineOptions& options, const std::string& part,
                   const ModelConfig& config = TinyConfig()) {
  for (const absl::Status& status :
       RunEngine(config, options, 2, [](Engine&) { return absl::OkStatus(); })) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_NE(std::string(status.message()).find(part), std::string::npos) << status;
  }
}

TEST(NullModelTest, WhatItCannotDoIsRefusedByName) {
  EngineOptions options = NullOptions();
  options.device = DeviceKind::kCuda;
  ExpectRefused(options, "--device cuda");
  options = NullOptions();
  options.check_tp_steps = 1;
  ExpectRefused(options, "--check-tp");
  options = NullOptions();
  options.check_attention = true;
  ExpectRefused(options, "--check-attention");
  options = NullOptions();
  options.attention_backend = "reference";
  ExpectRefused(options, "--attention-backend");
  options = NullOptions();
  options.null_step_seconds = -1;
  ExpectRefused(options, "null_step_seconds");
  options = EngineOptions();
  options.null_step_seconds = 0.01;
  ExpectRefused(options, "--null-step-ms");
  ModelConfig config = TinyConfig();
  config.head_dim = 2;
  options = NullOptions();
  options.dtype = DType::kBF16;
  ExpectRefused(options, "8 bytes", config);
}

}  // namespace
}  // namespace lockstep
