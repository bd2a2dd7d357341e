#include "runtime/engine.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "parallel/local_communicator.h"
#include "tests/runtime/engine_test_util.h"

namespace lockstep {
namespace {

EngineOptions TestOptions(int64_t max_num_batched_tokens = 2048) {
  EngineOptions options;
  options.max_num_batched_tokens = max_num_batched_tokens;
  options.max_num_seqs = 6;
  options.block_size = 4;
  options.kv_cache_memory_bytes = 1 << 20;
  return options;
}

std::vector<int32_t> MakePrompt(int64_t length, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<int32_t> prompt(static_cast<size_t>(length));
  for (int32_t& t : prompt) t = static_cast<int32_t>(random() % 101);
  return prompt;
}

struct Case {
  std::vector<int32_t> prompt;
  SamplingParams sampling;
};

// Greedy and seeded requests of many lengths.
std::vector<Case> Cases() {
  std::vector<Case> cases;
  const int64_t lengths[] = {1, 2, 5, 16, 17, 33, 64, 90};
  for (uint32_t i = 0; i < 8; ++i) {
    SamplingParams sampling;
    sampling.max_tokens = 20;
    sampling.temperature = i % 2 == 0 ? 0 : 0.05 * i;  // the logits of the tiny model are small
    sampling.seed = i / 3;
    if (i % 4 == 1) sampling.top_k = 10;
    if (i % 4 == 3) sampling.top_p = 0.8;
    cases.push_back({MakePrompt(lengths[i], i), sampling});
  }
  return cases;
}

std::vector<Result> RunTogether(const ModelConfig& config, const std::vector<Case>& cases,
                                const EngineOptions& options, int num_ranks) {
  std::vector<Result> results(cases.size());
  ExpectOk(RunEngine(config, options, num_ranks, [&](Engine& engine) -> absl::Status {
    for (size_t i = 0; i < cases.size(); ++i) {
      LOCKSTEP_RETURN_IF_ERROR(
          engine.Submit(Recorded(cases[i].prompt, cases[i].sampling, &results[i])).status());
    }
    return engine.RunUntilIdle();
  }));
  return results;
}

std::vector<Result> RunAlone(const ModelConfig& config, const std::vector<Case>& cases,
                             const EngineOptions& options, int num_ranks) {
  std::vector<Result> results(cases.size());
  ExpectOk(RunEngine(config, options, num_ranks, [&](Engine& engine) -> absl::Status {
    for (size_t i = 0; i < cases.size(); ++i) {
      LOCKSTEP_RETURN_IF_ERROR(
          engine.Submit(Recorded(cases[i].prompt, cases[i].sampling, &results[i])).status());
      LOCKSTEP_RETURN_IF_ERROR(engine.RunUntilIdle());
    }
    return absl::OkStatus();
  }));
  return results;
}

void ExpectSame(const std::vector<Result>& a, const std::vector<Result>& b,
                const std::string& what) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) EXPECT_EQ(a[i].tokens, b[i].tokens) << what << " " << i;
}

TEST(EngineTest, IdsDependNeitherOnRanksNorChunksNorNeighbours) {
  const std::vector<Case> cases = Cases();
  const std::vector<Result> alone = RunAlone(TinyConfig(), cases, TestOptions(), 1);
  for (const Result& result : alone) {
    EXPECT_EQ(result.tokens.size(), 20u);
    EXPECT_EQ(result.finish, FinishReason::kLength);
  }
  for (int num_ranks = 1; num_ranks <= 3; ++num_ranks) {
    ExpectSame(RunAlone(TinyConfig(), cases, TestOptions(), num_ranks), alone,
               absl::StrFormat("alone, %d ranks", num_ranks));
    for (const int64_t chunk : {1, 7, 64, 2048}) {
      ExpectSame(RunTogether(TinyConfig(), cases, TestOptions(chunk), num_ranks), alone,
                 absl::StrFormat("together, %d ranks, chunk %d", num_ranks, chunk));
    }
  }
}

TEST(EngineTest, SlidingWindowAndTwoThreadsToo) {
  ModelConfig config = TinyConfig();
  config.layer_windows = {10, 0};
  EngineOptions options = TestOptions();
  const std::vector<Case> cases = Cases();
  const std::vector<Result> alone = RunAlone(config, cases, options, 1);
  options.num_threads = 2;
  options.max_num_batched_tokens = 7;
  ExpectSame(RunTogether(config, cases, options, 2), alone, "two threads");
  EXPECT_NE(RunAlone(TinyConfig(), cases, TestOptions(), 1)[7].tokens, alone[7].tokens)
      << "the window changes nothing: the test is blind";
}

TEST(EngineTest, BFloat16IdsDependNeitherOnChunksNorNeighbours) {
  EngineOptions options = TestOptions();
  options.dtype = DType::kBF16;
  const std::vector<Case> cases = Cases();
  const std::vector<Result> alone = RunAlone(TinyConfig(), cases, options, 2);
  for (const int64_t chunk : {1, 7, 64}) {
    options.max_num_batched_tokens = chunk;
    ExpectSame(RunTogether(TinyConfig(), cases, options, 2), alone, "bfloat16");
  }
}

TEST(EngineTest, ScoredLogitsDependNeitherOnChunksNorNeighbours) {
  const std::vector<int32_t> prompt = MakePrompt(70, 3);
  for (int num_ranks = 1; num_ranks <= 3; ++num_ranks) {
    std::vector<float> first;
    for (const int64_t chunk : {2048, 64, 7, 1}) {
      Result scored, generated;
      ExpectOk(RunEngine(
          TinyConfig(), TestOptions(chunk), num_ranks, [&](Engine& engine) -> absl::Status {
            LOCKSTEP_RETURN_IF_ERROR(
                engine.Submit(Recorded(MakePrompt(9, 1), {}, &generated)).status());
            LOCKSTEP_RETURN_IF_ERROR(engine.Submit(Scored(prompt, 101, &scored)).status());
            return engine.RunUntilIdle();
          }));
      EXPECT_EQ(scored.finish, FinishReason::kLength);
      EXPECT_TRUE(scored.tokens.empty());
      ASSERT_EQ(scored.logits.size(), prompt.size() * 101);
      if (first.empty()) first = scored.logits;
      EXPECT_EQ(scored.logits, first) << "chunk " << chunk << ", " << num_ranks << " ranks";
    }
    // The last row is what generation starts from.
    Result greedy;
    SamplingParams sampling;
    sampling.temperature = 0;
    sampling.max_tokens = 1;
    ExpectOk(RunEngine(TinyConfig(), TestOptions(), 1, [&](Engine& engine) -> absl::Status {
      LOCKSTEP_RETURN_IF_ERROR(engine.Submit(Recorded(prompt, sampling, &greedy)).status());
      return engine.RunUntilIdle();
    }));
    const auto last = first.end() - 101;
    EXPECT_EQ(greedy.tokens[0], std::max_element(last, first.end()) - last);
  }
}

TEST(EngineTest, EndsAtStopTokensMaxTokensAndMaxModelLen) {
  const std::vector<int32_t> prompt = MakePrompt(12, 5);
  SamplingParams sampling;
  sampling.temperature = 0;
  sampling.max_tokens = 10000;
  EngineOptions options = TestOptions();
  options.max_model_len = 40;
  Result free, stopped, short_one;
  int events = 0;
  ExpectOk(RunEngine(TinyConfig(), options, 2, [&](Engine& engine) -> absl::Status {
    EXPECT_EQ(engine.max_model_len(), 40);
    LOCKSTEP_RETURN_IF_ERROR(engine.Submit(Recorded(prompt, sampling, &free)).status());
    LOCKSTEP_RETURN_IF_ERROR(engine.RunUntilIdle());
    SamplingParams with_stop = sampling;
    // The fifth id that was not seen before it.
    with_stop.stop_token_ids = {free.tokens[4]};
    LOCKSTEP_RETURN_IF_ERROR(engine.Submit(Recorded(prompt, with_stop, &stopped)).status());
    SamplingParams three = sampling;
    three.max_tokens = 3;
    LOCKSTEP_RETURN_IF_ERROR(engine.Submit(Recorded(prompt, three, &short_one)).status());
    Request cut;
    cut.prompt = prompt;
    cut.sampling = sampling;
    cut.on_event = [&](const RequestEvent&) { return ++events < 6; };
    LOCKSTEP_RETURN_IF_ERROR(engine.Submit(std::move(cut)).status());
    return engine.RunUntilIdle();
  }));
  EXPECT_EQ(free.tokens.size(), 28u);
  EXPECT_EQ(free.finish, FinishReason::kLength);
  const auto first_stop = std::find(free.tokens.begin(), free.tokens.end(), free.tokens[4]);
  EXPECT_EQ(stopped.tokens, std::vector<int32_t>(free.tokens.begin(), first_stop));
  EXPECT_EQ(stopped.finish, FinishReason::kStop);
  EXPECT_EQ(stopped.stop_token, free.tokens[4]);
  EXPECT_EQ(short_one.tokens, std::vector<int32_t>(free.tokens.begin(), free.tokens.begin() + 3));
  EXPECT_EQ(events, 6);
}

TEST(EngineTest, StatisticsAddUp) {
  ExpectOk(RunEngine(TinyConfig(), TestOptions(8), 2, [&](Engine& engine) -> absl::Status {
    Result result;
    SamplingParams sampling;
    sampling.max_tokens = 5;
    LOCKSTEP_RETURN_IF_ERROR(
        engine.Submit(Recorded(MakePrompt(20, 1), sampling, &result)).status());
    LOCKSTEP_RETURN_IF_ERROR(engine.RunUntilIdle());
    const EngineStats& stats = engine.stats();
    EXPECT_EQ(stats.prompt_tokens, 20);
    EXPECT_EQ(stats.generated_tokens, 5);
    EXPECT_EQ(stats.decode_tokens, 4);
    EXPECT_EQ(stats.steps, 3 + 4);
    EXPECT_GT(stats.load_seconds, 0);
    EXPECT_GT(stats.prefill_seconds, 0);
    EXPECT_GT(stats.decode_seconds, 0);
    return absl::OkStatus();
  }));
}

// The refusal of Create: the same on all ranks, and it names both numbers.
void ExpectRefused(const ModelConfig& config, const EngineOptions& options,
                   const std::vector<std::string>& parts) {
  for (const int num_ranks : {1, 2}) {
    const auto statuses = RunEngine(config, options, num_ranks, [](Engine&) -> absl::Status {
      ADD_FAILURE() << "not refused";
      return absl::OkStatus();
    });
    for (const absl::Status& status : statuses) {
      EXPECT_FALSE(status.ok());
      EXPECT_EQ(status, statuses[0]);
      for (const std::string& part : parts) {
        EXPECT_NE(std::string(status.message()).find(part), std::string::npos)
            << status << " should name " << part;
      }
    }
  }
}

TEST(EngineTest, BadOptionsAreRefusedWithNumbers) {
  EngineOptions options = TestOptions();
  options.max_model_len = 161;
  ExpectRefused(TinyConfig(), options, {"161", "160"});

  options = TestOptions();
  options.max_model_len = 100;
  options.kv_cache_memory_bytes = 2 * 2 * 3 * 4 * 8 * 4 * 10;  // 10 blocks of 4 tokens, one rank
  ExpectRefused(TinyConfig(), options, {"100", "max_model_len", "rank 0"});

  options = TestOptions();
  options.kv_cache_memory_bytes = 10;
  ExpectRefused(TinyConfig(), options, {"no block", "rank 0"});

  options = TestOptions();
  options.block_size = 0;
  ExpectRefused(TinyConfig(), options, {"block_size", "0"});

  options = TestOptions();
  options.max_num_batched_tokens = 0;
  ExpectRefused(TinyConfig(), options, {"max_num_batched_tokens", "0"});

  options = TestOptions();
  options.dtype = DType::kF16;
  ExpectRefused(TinyConfig(), options, {"float16"});

  options = TestOptions();
  options.attention_backend = "no-such";
  ExpectRefused(TinyConfig(), options, {"no-such"});

  options = TestOptions();
  options.kv_cache_dtype = DType::kF8E4M3;
  ExpectRefused(TinyConfig(), options, {"cpu: KV cache dtype fp8_e4m3 is not supported"});

  // More ranks than query heads.
  for (const absl::Status& status :
       RunEngine(TinyConfig(), TestOptions(), 7, [](Engine&) { return absl::OkStatus(); })) {
    EXPECT_FALSE(status.ok());
  }
}

// A quarter of float32's bytes a token, and the same answers at every rank count: heads are
// quantised whole.
TEST(EngineTest, Fp8KvCacheThroughTheReferenceBackend) {
  EngineOptions options = TestOptions();
  options.attention_backend = "reference";
  options.kv_cache_dtype = DType::kF8E4M3;
  const std::vector<Result> one = RunTogether(TinyConfig(), Cases(), options, 1);
  EXPECT_EQ(RunTogether(TinyConfig(), Cases(), options, 2), one);
  for (const Result& result : one) EXPECT_EQ(std::ssize(result.tokens), 20);
  options.kv_cache_memory_bytes = 2 * 2 * 3 * 4 * 8 * 10;  // 10 blocks of 4 tokens, one rank
  ExpectOk(RunEngine(TinyConfig(), options, 1, [](Engine& engine) {
    EXPECT_EQ(engine.max_model_len(), 40);
    return absl::OkStatus();
  }));
}

TEST(EngineTest, SmallKvMemoryShortensTheDefaultLength) {
  EngineOptions options = TestOptions();
  options.kv_cache_memory_bytes = 2 * 2 * 3 * 4 * 8 * 4 * 10;  // 10 blocks of 4 tokens, one rank
  Result clipped, after;
  ExpectOk(RunEngine(TinyConfig(), options, 1, [&](Engine& engine) -> absl::Status {
    EXPECT_EQ(engine.max_model_len(), 40);
    // Too long: refused at once with both numbers, and a normal request runs after it.
    const auto refused = engine.Submit(Recorded(MakePrompt(41, 1), {}, &clipped)).status();
    EXPECT_NE(std::string(refused.message()).find("41"), std::string::npos) << refused;
    EXPECT_NE(std::string(refused.message()).find("40"), std::string::npos) << refused;
    SamplingParams sampling;
    sampling.max_tokens = 200;
    LOCKSTEP_RETURN_IF_ERROR(
        engine.Submit(Recorded(MakePrompt(35, 1), sampling, &clipped)).status());
    sampling.max_tokens = 2;
    LOCKSTEP_RETURN_IF_ERROR(engine.Submit(Recorded(MakePrompt(5, 1), sampling, &after)).status());
    return engine.RunUntilIdle();
  }));
  EXPECT_EQ(clipped.tokens.size(), 5u);
  EXPECT_EQ(clipped.finish, FinishReason::kLength);
  EXPECT_EQ(after.tokens.size(), 2u);
}

TEST(EngineTest, AutomaticKvMemoryHoldsOneWholeSequence) {
  EngineOptions options = TestOptions();
  options.kv_cache_memory_bytes = 0;
  Result result;
  ExpectOk(RunEngine(TinyConfig(), options, 3, [&](Engine& engine) -> absl::Status {
    EXPECT_EQ(engine.max_model_len(), 160);
    SamplingParams sampling;
    sampling.max_tokens = 1000;
    LOCKSTEP_RETURN_IF_ERROR(
        engine.Submit(Recorded(MakePrompt(150, 1), sampling, &result)).status());
    return engine.RunUntilIdle();
  }));
  EXPECT_EQ(result.tokens.size(), 10u);
}

// A checkpoint that one rank cannot read.
class BrokenCheckpoint : public Checkpoint {
 public:
  explicit BrokenCheckpoint(std::unique_ptr<Checkpoint> inner) : inner_(std::move(inner)) {}
  std::string description() const override { return inner_->description(); }
  const TensorInfo* Find(const std::string& name) const override { return inner_->Find(name); }
  std::vector<std::string> Names() const override { return inner_->Names(); }
  absl::Status Read(const std::string& name, Range rows, Range cols,
                    const MatrixView& dst) const override {
    if (name.find("layers.1.mlp") != std::string::npos) {
      return absl::FailedPreconditionError(name + ": the disk is gone");
    }
    return inner_->Read(name, rows, cols, dst);
  }

 private:
  std::unique_ptr<Checkpoint> inner_;
};

TEST(EngineTest, FaultOfOneRankAtStartIsToldByAll) {
  const auto statuses = RunLocalRanks(3, [&](Communicator& communicator) -> absl::Status {
    ModelSource source = TinySource(TinyConfig());
    if (communicator.rank() == 1) {
      source.checkpoint = std::make_unique<BrokenCheckpoint>(std::move(source.checkpoint));
    }
    return Engine::Create(source, TestOptions(), communicator).status();
  });
  for (const absl::Status& status : statuses) {
    EXPECT_EQ(status, statuses[0]);
    EXPECT_NE(std::string(status.message()).find("rank 1"), std::string::npos) << status;
    EXPECT_NE(std::string(status.message()).find("the disk is gone"), std::string::npos);
  }
}

TEST(EngineTest, DestructorStopsTheOthers) {
  ExpectOk(RunLocalRanks(3, [&](Communicator& communicator) -> absl::Status {
    const ModelSource source = TinySource(TinyConfig());
    LOCKSTEP_ASSIGN_OR_RETURN(std::unique_ptr<Engine> engine,
                              Engine::Create(source, TestOptions(), communicator));
    return communicator.rank() == 0 ? absl::OkStatus() : engine->Follow();
  }));
}

TEST(EngineTest, StopIsIdempotentAndFinal) {
  ExpectOk(RunEngine(TinyConfig(), TestOptions(), 2, [&](Engine& engine) -> absl::Status {
    LOCKSTEP_RETURN_IF_ERROR(engine.Stop());
    LOCKSTEP_RETURN_IF_ERROR(engine.Stop());
    Result result;
    EXPECT_FALSE(engine.Submit(Recorded({1}, {}, &result)).ok());
    EXPECT_FALSE(engine.RunUntilIdle().ok());
    EXPECT_FALSE(engine.Follow().ok());
    return absl::OkStatus();
  }));
}

// Its vocabulary is its own part; one rank of one is the engine as it always is.
TEST(EngineTest, AnEmulatedRankAnswersWithItsOwnIds) {
  SamplingParams sampling;
  sampling.temperature = 0;
  sampling.max_tokens = 12;
  const std::vector<int32_t> prompt = {5, 60, 99, 2};
  const auto run = [&](EmulatedRank emulated) {
    EngineOptions options = TestOptions();
    options.emulated = emulated;
    Result result;
    ExpectOk(RunEngine(TinyConfig(), options, 1, [&](Engine& engine) {
      LOCKSTEP_RETURN_IF_ERROR(engine.Submit(Recorded(prompt, sampling, &result)).status());
      return engine.RunUntilIdle();
    }));
    return result.tokens;
  };
  EXPECT_EQ(run({1, 0}), run({}));
  const auto partition = PartitionModel(TinyConfig().Dims(), 3);
  for (int rank = 0; rank < 3; ++rank) {
    const Range own = (*partition)[static_cast<size_t>(rank)].vocab;
    const std::vector<int32_t> ids = run({3, rank});
    EXPECT_EQ(ids.size(), 12);
    for (const int32_t id : ids) EXPECT_TRUE(own.begin <= id && id < own.end) << id;
  }

  EngineOptions options = TestOptions();
  options.emulated = {3, 3};
  ExpectRefused(TinyConfig(), options, {"--rank 3", "0 to 2"});
  options.emulated = {3, 1};
  Result scored;
  ExpectOk(RunEngine(TinyConfig(), options, 1, [&](Engine& engine) {
    EXPECT_FALSE(engine.Submit(Scored(prompt, TinyConfig().vocab_size, &scored)).ok());
    return absl::OkStatus();
  }));
}

}  // namespace
}  // namespace lockstep
