// The debugging checks inside an engine: they see what the scheduler makes of requests, leave the
// answers as they are, and end the job on all ranks alike.
#include <gtest/gtest.h>

#include <random>

#include "model/checkpoint/tensor_names.h"
#include "parallel/local_communicator.h"
#include "tests/runtime/engine_test_util.h"

namespace lockstep {
namespace {

// What a run gave: of single requests, and (choice, token) of a forked one.
struct Answers {
  std::vector<Result> results = std::vector<Result>(6);
  std::vector<std::pair<int32_t, int32_t>> forked;

  bool operator==(const Answers&) const = default;
};

// Requests that share a prefix, fork, are scored, and do not fit the KV blocks all at once.
absl::Status RunRequests(Engine& engine, Answers& answers) {
  std::vector<Result>& results = answers.results;
  std::mt19937 random(7);
  std::vector<int32_t> prefix(20);
  for (int32_t& id : prefix) id = static_cast<int32_t>(random() % 101);
  for (size_t i = 0; i < results.size(); ++i) {
    std::vector<int32_t> prompt = prefix;
    prompt.resize(i == 1 ? 3 : 24 + i, static_cast<int32_t>(random() % 101));
    SamplingParams sampling;
    sampling.temperature = i % 2 == 0 ? 0 : 0.5;
    sampling.seed = i;
    sampling.max_tokens = 24;
    Request request =
        i == 2 ? Scored(prompt, 101, &results[i]) : Recorded(prompt, sampling, &results[i]);
    LOCKSTEP_RETURN_IF_ERROR(engine.Submit(std::move(request)).status());
  }
  Request forked;
  forked.prompt = prefix;
  forked.prompt.insert(forked.prompt.end(), {5, 6, 7});  // the last block is copied in part
  forked.sampling.temperature = 0.5;
  forked.sampling.max_tokens = 12;
  forked.sampling.n = 3;
  forked.on_event = [&answers](const RequestEvent& event) {
    if (event.token.has_value()) answers.forked.emplace_back(event.choice, *event.token);
    return true;
  };
  LOCKSTEP_RETURN_IF_ERROR(engine.Submit(std::move(forked)).status());
  return engine.RunUntilIdle();
}

EngineOptions SmallOptions() {
  EngineOptions options;
  options.block_size = 4;
  options.max_num_batched_tokens = 32;
  options.max_model_len = 64;
  options.num_gpu_blocks_override = 20;
  options.poison_freed_blocks = true;
  return options;
}

TEST(EngineChecksTest, ChecksSeeNoDifferenceAndChangeNothing) {
  for (const int ranks : {2, 3}) {
    EngineOptions options = SmallOptions();
    Answers expected;
    EngineStats stats;
    ExpectOk(RunEngine(TinyConfig(), options, ranks,
                       [&](Engine& engine) { return RunRequests(engine, expected); }));
    options.check_tp_steps = 1000;
    options.check_attention = true;
    Answers results;
    ExpectOk(RunEngine(TinyConfig(), options, ranks, [&](Engine& engine) {
      const absl::Status status = RunRequests(engine, results);
      stats = engine.stats();
      return status;
    }));
    EXPECT_TRUE(results == expected);
    EXPECT_EQ(results.forked.size(), 36u);
    EXPECT_GT(stats.steps, 20);
    // Without these the changes of the pool would hardly be tested.
    EXPECT_GT(stats.scheduler.num_preemptions, 0);
    EXPECT_GT(stats.scheduler.prefix_cache_hit_tokens, 0);
  }
}

// Corrupts the shards of one rank; a whole tensor, which only the model of one rank reads, is
// right.
class WrongShard : public Checkpoint {
 public:
  WrongShard(std::unique_ptr<Checkpoint> right, std::string tensor)
      : right_(std::move(right)), tensor_(std::move(tensor)) {}

  std::string description() const override { return right_->description(); }
  const TensorInfo* Find(const std::string& name) const override { return right_->Find(name); }
  std::vector<std::string> Names() const override { return right_->Names(); }
  absl::Status Read(const std::string& name, Range rows, Range cols,
                    const MatrixView& dst) const override {
    LOCKSTEP_RETURN_IF_ERROR(right_->Read(name, rows, cols, dst));
    if (name == tensor_ && dst.rows < Find(name)->rows()) dst.row<float>(dst.rows - 1)[0] += 1;
    return absl::OkStatus();
  }

 private:
  const std::unique_ptr<Checkpoint> right_;
  const std::string tensor_;
};

std::vector<absl::Status> RunWithWrongShard(const EngineOptions& options, int ranks,
                                            int wrong_rank) {
  return RunLocalRanks(ranks, [&](Communicator& communicator) -> absl::Status {
    ModelSource source = TinySource(TinyConfig());
    if (communicator.rank() == wrong_rank) {
      source.checkpoint =
          std::make_unique<WrongShard>(std::move(source.checkpoint), LayerTensor(1, kGateWeight));
    }
    LOCKSTEP_ASSIGN_OR_RETURN(const auto engine, Engine::Create(source, options, communicator));
    if (communicator.rank() != 0) return engine->Follow();
    Answers answers;
    return RunRequests(*engine, answers);
  });
}

TEST(EngineChecksTest, AWrongShardEndsTheJobOnAllRanks) {
  EngineOptions options = SmallOptions();
  options.check_tp_steps = 3;
  for (const int wrong_rank : {0, 1, 2}) {
    const std::vector<absl::Status> statuses = RunWithWrongShard(options, 3, wrong_rank);
    for (const absl::Status& status : statuses) {
      EXPECT_TRUE(absl::IsInternal(status)) << status;
      EXPECT_EQ(status, statuses[0]);
    }
    const std::string expected = absl::StrFormat(
        "--check-tp: step 1: layer 1 gate_up is apart on rank %d of 3; ", wrong_rank);
    EXPECT_TRUE(statuses[0].message().find(expected) == 0) << statuses[0];
  }
}

TEST(EngineChecksTest, WhatCannotBeComparedIsRefused) {
  const auto refusal = [](const EngineOptions& options, int ranks) {
    const auto statuses =
        RunEngine(TinyConfig(), options, ranks, [](Engine&) { return absl::OkStatus(); });
    for (const absl::Status& status : statuses) {
      EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    }
    return std::string(statuses[0].message());
  };
  EngineOptions tp = SmallOptions();
  tp.check_tp_steps = 3;
  EXPECT_NE(refusal(tp, 1).find("--check-tp needs at least two ranks"), std::string::npos);
  EngineOptions attention = SmallOptions();
  attention.check_attention = true;
  attention.attention_backend = "reference";
  EXPECT_NE(refusal(attention, 2).find("--check-attention: "), std::string::npos);
}

}  // namespace
}  // namespace lockstep
