// --check-tp: silent where the ranks compute what one rank does, and it names layer, tensor and
// rank of a fault put into one rank.
#include "runtime/tp_check.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <random>

#include "model/checkpoint/tensor_names.h"
#include "parallel/local_communicator.h"
#include "tests/model/memory_checkpoint.h"
#include "tests/model/model_runner.h"
#include "tests/parallel/forwarding_communicator.h"

namespace lockstep {
namespace {

// 9 query heads over 3 KV heads: on 2 ranks (5 + 4) KV head 1 is on both. F and V split unevenly.
ModelConfig NineHeads() {
  ModelConfig config;
  config.model_type = "llama";
  config.hidden_size = 40;
  config.intermediate_size = 100;
  config.num_layers = 2;
  config.num_query_heads = 9;
  config.num_kv_heads = 3;
  config.head_dim = 8;
  config.vocab_size = 121;
  config.max_position_embeddings = 512;
  config.qk_norm = true;
  config.qkv_bias = true;
  config.o_bias = true;
  config.mlp_bias = true;
  config.layer_windows = {0, 0};
  return config;
}

// What is wrong on one rank. The model of one rank is never touched.
struct Fault {
  int rank = -1;  // -1: none
  // Alters what was read of a tensor; float32.
  std::function<void(const std::string& name, Range rows, Range cols, const MatrixView& read)>
      weights = {};
  // Which rows of a tensor are read instead of those that the rank should hold.
  std::function<Range(const std::string& name, Range rows)> rows = {};
  std::function<void(ModelConfig& config)> config = {};
  int64_t skipped_sum = -1;  // the all-reduce of a step whose result does not reach the rank
  bool pool_change_forgotten = false;
};

class FaultyCheckpoint : public Checkpoint {
 public:
  FaultyCheckpoint(const Checkpoint& right, const Fault& fault) : right_(right), fault_(fault) {}

  std::string description() const override { return right_.description(); }
  const TensorInfo* Find(const std::string& name) const override { return right_.Find(name); }
  std::vector<std::string> Names() const override { return right_.Names(); }
  absl::Status Read(const std::string& name, Range rows, Range cols,
                    const MatrixView& dst) const override {
    if (fault_.rows) rows = fault_.rows(name, rows);
    LOCKSTEP_RETURN_IF_ERROR(right_.Read(name, rows, cols, dst));
    if (fault_.weights) fault_.weights(name, rows, cols, dst);
    return absl::OkStatus();
  }

 private:
  const Checkpoint& right_;
  const Fault& fault_;
};

// Takes part in every collective; of one sum it drops the result.
class FaultyCommunicator : public ForwardingCommunicator {
 public:
  FaultyCommunicator(Communicator& right, int64_t skipped_sum)
      : ForwardingCommunicator(right), skipped_sum_(skipped_sum) {}
  absl::Status AllReduceSum(float* data, int64_t count) override {
    if (sums_++ != skipped_sum_) return ForwardingCommunicator::AllReduceSum(data, count);
    std::vector<float> sum(data, data + count);
    return ForwardingCommunicator::AllReduceSum(sum.data(), count);
  }

 private:
  const int64_t skipped_sum_;
  int64_t sums_ = 0;
};

struct Outcome {
  std::vector<absl::Status> statuses;
  std::string summary;
};

// One rank's run: prefill, mixed and decode steps, a fork that copies a block to a poisoned one.
absl::Status RunSteps(ModelRunner& runner, TpChecker& checker, bool pool_change_forgotten) {
  runner.set_after_forward([&](const ForwardBatch& batch) {
    if (!checker.active()) return absl::OkStatus();
    const absl::Status status = checker.Check(batch, nullptr);
    runner.decoder().set_observer(checker.observer());
    return status;
  });
  runner.decoder().set_observer(checker.observer());
  const auto step = [&](const std::vector<Chunk>& chunks) { return runner.Step(chunks).status(); };
  LOCKSTEP_RETURN_IF_ERROR(step({{0, {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13}, 0, 13},
                                 {1, {100, 120, 60}, 0, 5},
                                 {9, {8}, 0, 1}}));
  LOCKSTEP_RETURN_IF_ERROR(step({{0, {14}, 13, 13}, {1, {77, 5}, 3, 5}}));
  // Request 9 has ended, and its block goes to request 2, which continues request 0: 14 tokens in
  // three full blocks, shared, and half a block, copied.
  const int32_t target = runner.table(9)[0];
  std::vector<int32_t>& fork = runner.table(2) = runner.table(0);
  const PlanBlockCopy copy{.source = fork.back(), .target = target};
  fork.back() = target;
  LOCKSTEP_CHECK(runner.pool().Poison(target).ok());
  LOCKSTEP_CHECK(runner.pool().Copy(copy.source, copy.target).ok());
  if (!pool_change_forgotten) {
    LOCKSTEP_RETURN_IF_ERROR(checker.ChangePool({&target, 1}, {&copy, 1}));
  }
  LOCKSTEP_RETURN_IF_ERROR(step({{2, {99}, 14, 13}, {0, {15}, 14, 13}}));
  return step({{1, {3}, 5, 5}, {2, {98}, 15, 13}});
}

using Steps = std::function<absl::Status(ModelRunner& runner, TpChecker& checker)>;

Outcome RunJob(const ModelConfig& config, int ranks, const Fault& fault, const Steps& steps,
               DType dtype = DType::kF32, int64_t num_steps = 10) {
  std::random_device device;
  const uint32_t seed = device();
  SCOPED_TRACE(seed);
  Outcome outcome;
  const MemoryCheckpoint weights(config, seed);
  const Fault none;
  outcome.statuses = RunLocalRanks(ranks, [&](Communicator& communicator) -> absl::Status {
    const Fault& mine = communicator.rank() == fault.rank ? fault : none;
    ModelSource source{.path = "", .config = config, .generation = {}, .checkpoint = nullptr};
    source.checkpoint = std::make_unique<FaultyCheckpoint>(weights, none);
    ModelSource faulty{.path = "", .config = config, .generation = {}, .checkpoint = nullptr};
    faulty.checkpoint = std::make_unique<FaultyCheckpoint>(weights, mine);
    if (mine.config) mine.config(faulty.config);
    FaultyCommunicator decoder_communicator(communicator, mine.skipped_sum);
    RunnerOptions options;
    options.dtype = options.kv_dtype = dtype;
    options.max_num_batched_tokens = 512;
    auto runner = ModelRunner::Create(faulty, options, decoder_communicator);
    LOCKSTEP_RETURN_IF_ERROR(Agree(communicator, runner.status()));
    const TpCheckOptions check{.num_steps = num_steps,
                               .model = {.dtype = dtype,
                                         .kv_dtype = dtype,
                                         .max_num_batched_tokens = options.max_num_batched_tokens,
                                         .max_model_len = options.max_model_len,
                                         .block_size = ModelRunner::kBlockSize}};
    LOCKSTEP_ASSIGN_OR_RETURN(const std::vector<RankPartition> partition,
                              PartitionModel(config.Dims(), ranks));
    LOCKSTEP_ASSIGN_OR_RETURN(
        auto checker, TpChecker::Create(source, check, partition, /*cuda=*/nullptr, communicator,
                                        (*runner)->threads()));
    LOCKSTEP_RETURN_IF_ERROR(checker->CreatePool((*runner)->pool().num_blocks()));
    EXPECT_EQ(checker->gpu_bytes_per_block(), 0);
    const absl::Status status = steps(**runner, *checker);
    if (communicator.rank() == 0) outcome.summary = checker->Summary();
    return status;
  });
  return outcome;
}

Outcome RunJob(int ranks, const Fault& fault) {
  return RunJob(NineHeads(), ranks, fault, [&](ModelRunner& runner, TpChecker& checker) {
    return RunSteps(runner, checker, fault.pool_change_forgotten);
  });
}

void ExpectAgreed(const Outcome& outcome, const std::string& summary) {
  for (const absl::Status& status : outcome.statuses) EXPECT_TRUE(status.ok()) << status;
  EXPECT_NE(outcome.summary.find(summary), std::string::npos) << outcome.summary;
}

// All ranks have the same error, which holds each of the texts.
void ExpectNamed(const Outcome& outcome, const std::vector<std::string>& texts) {
  for (const absl::Status& status : outcome.statuses) {
    EXPECT_TRUE(absl::IsInternal(status)) << status;
    EXPECT_EQ(status, outcome.statuses[0]);
  }
  const std::string message(outcome.statuses[0].message());
  for (const std::string& text : texts) {
    EXPECT_NE(message.find(text), std::string::npos) << message << "\nshould say " << text;
  }
}

// A fault in the first element that `rank` reads of `tensor`.
Fault InWeight(int rank, const std::string& tensor) {
  return {.rank = rank,
          .weights = [tensor](const std::string& name, Range, Range, const MatrixView& read) {
            if (name == tensor) read.row<float>(0)[0] += 0.5f;
          }};
}
Fault Dropped(int rank, const std::string& tensor) {
  return {.rank = rank,
          .weights = [tensor](const std::string& name, Range, Range, const MatrixView& read) {
            if (name == tensor) std::fill_n(read.row<float>(0), read.cols, 0.0f);
          }};
}

class TpCheckTest : public testing::TestWithParam<int> {
 protected:
  std::string Of() const {
    return absl::StrFormat(" of %d; the tolerance is 0.000244", GetParam());
  }
  std::string OnRank1() const { return " is apart on rank 1" + Of(); }
  std::string OnAllRanks() const {
    return std::string(" is apart on ranks ") + (GetParam() == 2 ? "0, 1" : "0, 1, 2") + Of();
  }
};

TEST_P(TpCheckTest, RanksThatComputeWhatOneDoesAgree) {
  ExpectAgreed(RunJob(GetParam(), {}),
               absl::StrFormat("--check-tp: 4 steps, 76 tensors of each of %d ranks compared with "
                               "one rank's: all agree within 0.000244; largest",
                               GetParam()));
}

TEST_P(TpCheckTest, Bfloat16Agrees) {
  const Steps steps = [](ModelRunner& runner, TpChecker& checker) {
    return RunSteps(runner, checker, false);
  };
  ExpectAgreed(RunJob(NineHeads(), GetParam(), {}, steps, DType::kBF16),
               "all agree within 0.000244; largest");
}

TEST_P(TpCheckTest, OnlyTheFirstStepsAreChecked) {
  const Steps steps = [](ModelRunner& runner, TpChecker& checker) {
    LOCKSTEP_RETURN_IF_ERROR(RunSteps(runner, checker, /*pool_change_forgotten=*/true));
    EXPECT_FALSE(checker.active());
    EXPECT_EQ(checker.observer(), nullptr);
    return absl::OkStatus();
  };
  ExpectAgreed(RunJob(NineHeads(), GetParam(), {}, steps, DType::kF32, /*num_steps=*/2),
               "--check-tp: 2 steps, 38 tensors of each");
}

TEST_P(TpCheckTest, AWrongWeightOfOneRankIsNamed) {
  ExpectNamed(RunJob(GetParam(), InWeight(1, LayerTensor(1, kQWeight))),
              {"step 1: layer 1 qkv" + OnRank1(), "Largest: rank 1, row ", " query head ",
               " one rank has "});
  ExpectNamed(RunJob(GetParam(), InWeight(1, LayerTensor(0, kKWeight))),
              {"step 1: layer 0 qkv" + OnRank1(), " key head "});
  // On 2 ranks the first KV head of rank 1 is also on rank 0.
  ExpectNamed(RunJob(GetParam(), InWeight(1, LayerTensor(0, kVWeight))),
              {"layer 0 qkv" + OnRank1(), " value head 1, element 0: "});
  ExpectNamed(RunJob(GetParam(), InWeight(1, LayerTensor(1, kQNorm))),
              {"layer 1 qkv" + OnRank1(), " query head "});
  ExpectNamed(RunJob(GetParam(), InWeight(1, LayerTensor(1, kUpWeight))),
              {"layer 1 gate_up" + OnRank1(), " up row "});
  ExpectNamed(RunJob(GetParam(), InWeight(1, LayerTensor(0, kInputNorm))),
              {"layer 0 input_layernorm" + OnRank1(), " column 0: "});
  ExpectNamed(RunJob(GetParam(), InWeight(1, LayerTensor(1, kPostAttentionNorm))),
              {"layer 1 post_attention_layernorm" + OnRank1()});
  ExpectNamed(RunJob(GetParam(), InWeight(1, kFinalNorm)), {"step 1: norm" + OnRank1()});
  ExpectNamed(RunJob(GetParam(), InWeight(1, kLmHead)),
              {"step 1: logits" + OnRank1(), " token id "});
}

TEST_P(TpCheckTest, AWrongPartOfASumIsSeenOnAllRanks) {
  const std::string same = "All ranks hold the same sum";
  ExpectNamed(RunJob(GetParam(), InWeight(1, LayerTensor(1, kOWeight))),
              {"step 1: layer 1 o_proj" + OnAllRanks(), " column 0: ", same});
  ExpectNamed(RunJob(GetParam(), InWeight(1, LayerTensor(0, kDownWeight))),
              {"step 1: layer 0 down_proj" + OnAllRanks(), " column 0: ", same});
  // Token 100 is rank 1's on 2 ranks, rank 2's on 3.
  const Fault embedding = {
      .rank = GetParam() - 1,
      .weights = [](const std::string& name, Range rows, Range, const MatrixView& read) {
        if (name == kEmbedTokens) read.row<float>(100 - rows.begin)[7] += 0.5f;
      }};
  ExpectNamed(RunJob(GetParam(), embedding),
              {"step 1: embed_tokens" + OnAllRanks(),
               "row 13 (request 1 of the step, position 0), column 7: ", same});
}

TEST_P(TpCheckTest, ADroppedBiasIsNamed) {
  // Rank 0 alone holds it, so that it counts once.
  ExpectNamed(RunJob(GetParam(), Dropped(0, LayerTensor(1, kOBias))),
              {"layer 1 o_proj" + OnAllRanks(), "All ranks hold the same sum"});
  ExpectNamed(RunJob(GetParam(), Dropped(1, LayerTensor(0, kKBias))),
              {"layer 0 qkv" + OnRank1(), " key head "});
  ExpectNamed(RunJob(GetParam(), Dropped(1, LayerTensor(1, kGateBias))),
              {"layer 1 gate_up" + OnRank1(), " gate row "});
}

TEST_P(TpCheckTest, ASkippedSumIsNamed) {
  const std::vector<std::string> tensors = {"embed_tokens", "layer 0 o_proj", "layer 0 down_proj",
                                            "layer 1 o_proj", "layer 1 down_proj"};
  for (int64_t i = 0; i < 10; ++i) {  // of the first and of the second step
    ExpectNamed(RunJob(GetParam(), {.rank = 1, .skipped_sum = i}),
                {absl::StrFormat("step %d: %s", i / 5 + 1, tensors[i % 5]) + OnRank1()});
  }
}

TEST_P(TpCheckTest, AWrongPartitionIsNamed) {
  // As many rows as it should have, but the first ones, which are rank 0's.
  const auto rank_0s = [](const std::string& tensor) -> Fault {
    return {.rank = 1, .rows = [tensor](const std::string& name, Range rows) {
              return name == tensor ? Range{0, rows.size()} : rows;
            }};
  };
  ExpectNamed(RunJob(GetParam(), rank_0s(LayerTensor(0, kVWeight))),
              {"layer 0 qkv" + OnRank1(), " value head "});
  ExpectNamed(RunJob(GetParam(), rank_0s(LayerTensor(1, kGateWeight))),
              {"layer 1 gate_up" + OnRank1(), " gate row "});
  ExpectNamed(RunJob(GetParam(), rank_0s(kEmbedTokens)), {"embed_tokens" + OnAllRanks()});
  const Fault fewer_rows = {.rank = 1,
                            .config = [](ModelConfig& config) { config.intermediate_size = 61; }};
  ExpectNamed(RunJob(GetParam(), fewer_rows),
              {"step 1: layer 0 gate_up of rank 1 is not what the partition says: 17 rows of "});
}

TEST_P(TpCheckTest, AnotherRopeOnOneRankIsNamed) {
  const Fault rope = {.rank = 1, .config = [](ModelConfig& config) { config.rope.theta = 5000; }};
  ExpectNamed(RunJob(GetParam(), rope), {"step 1: layer 0 qkv" + OnRank1()});
}

// The pool's changes count: without them the model of one rank reads another token's keys.
TEST_P(TpCheckTest, BlockCopiesMustReachTheChecker) {
  const Fault forgotten = {.rank = GetParam(), .pool_change_forgotten = true};
  ExpectNamed(RunJob(GetParam(), forgotten),
              {"step 3: layer 0 attention is apart on rank",
               "row 0 (request 0 of the step, position 14), query head "});
}

// A read of a poisoned block gives NaN on both sides: a fault, but none between ranks.
TEST_P(TpCheckTest, PoisonedBlocksReachTheChecker) {
  const Steps steps = [](ModelRunner& runner, TpChecker& checker) {
    runner.set_after_forward(
        [&](const ForwardBatch& batch) { return checker.Check(batch, nullptr); });
    runner.decoder().set_observer(checker.observer());
    LOCKSTEP_RETURN_IF_ERROR(runner.Step({{0, {1, 2, 3, 4, 5}, 0, 5}}).status());
    const int32_t block = runner.table(0)[0];
    LOCKSTEP_CHECK(runner.pool().Poison(block).ok());
    LOCKSTEP_RETURN_IF_ERROR(checker.ChangePool({&block, 1}, {}));
    LOCKSTEP_ASSIGN_OR_RETURN(const Logits logits, runner.Step({{0, {6}, 5, 5}}));
    EXPECT_TRUE(std::isnan(logits[0][0]));
    return absl::OkStatus();
  };
  ExpectAgreed(RunJob(NineHeads(), GetParam(), {}, steps), "2 steps, 38 tensors of each");
}

TEST_P(TpCheckTest, OfALongStepTheFirstAndLastRowsAreCompared) {
  std::vector<int32_t> prompt(300, 1);
  prompt[127] = 2;
  // Rows between are not compared. That others attend to them is no difference: the model of one
  // rank is given their keys and values.
  prompt[128] = prompt[171] = 3;
  prompt[172] = 4;
  const Steps steps = [&](ModelRunner& runner, TpChecker& checker) {
    runner.set_after_forward(
        [&](const ForwardBatch& batch) { return checker.Check(batch, nullptr); });
    runner.decoder().set_observer(checker.observer());
    return runner.Step({{0, prompt, 0, 300}}).status();
  };
  for (const int32_t token : {1, 2, 3, 4}) {
    const Fault fault = {
        .rank = 0,
        .weights = [token](const std::string& name, Range, Range, const MatrixView& read) {
          if (name == kEmbedTokens) read.row<float>(token)[0] += 0.5f;
        }};
    const Outcome outcome = RunJob(NineHeads(), GetParam(), fault, steps);
    if (token == 3) {
      ExpectAgreed(outcome, "(at most 256 rows of a step): all agree");
    } else {
      const std::string row = token == 1 ? "row " : token == 2 ? "row 127 (" : "row 172 (";
      ExpectNamed(outcome, {"embed_tokens" + OnAllRanks(), row});
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, TpCheckTest, testing::Values(2, 3),
                         [](const auto& info) { return absl::StrCat("Np", info.param); });

TEST(TpTolerancesTest, FollowTheTypes) {
  const TpTolerances exact = TpTolerancesOf(DType::kF32, DType::kF32);
  EXPECT_EQ(exact.activations, 0x1p-12);
  EXPECT_EQ(exact.keys_and_values, 0x1p-12);
  const TpTolerances bf16 = TpTolerancesOf(DType::kBF16, DType::kBF16);
  EXPECT_EQ(bf16.activations, bf16.keys_and_values);
  const TpTolerances fp8 = TpTolerancesOf(DType::kBF16, DType::kF8E4M3);
  EXPECT_EQ(fp8.activations, bf16.activations);
  EXPECT_GT(fp8.keys_and_values, 0.125);  // the next number of 4 bits
  EXPECT_LT(fp8.keys_and_values, 1);
}

TEST(TpCheckRefusalTest, OneRankIsNotCompared) {
  const Outcome outcome = RunJob(1, {});
  EXPECT_TRUE(absl::IsInvalidArgument(outcome.statuses[0])) << outcome.statuses[0];
  EXPECT_EQ(outcome.statuses[0].message(),
            "--check-tp needs at least two ranks: it compares them with one");
}

TEST(TpCheckRefusalTest, AFaultAtLoadingIsToldToAllRanks) {
  const ModelConfig config = NineHeads();
  const auto partition = PartitionModel(config.Dims(), 2);
  ASSERT_TRUE(partition.ok());
  const auto statuses = RunLocalRanks(2, [&](Communicator& communicator) -> absl::Status {
    MemoryCheckpoint* weights = nullptr;
    const ModelSource source = MakeSource(config, &weights);
    weights->Remove(LayerTensor(1, kDownWeight));
    ThreadPool threads(1);
    return TpChecker::Create(source,
                             {.num_steps = 1,
                              .model = {.dtype = DType::kF32,
                                        .max_num_batched_tokens = 8,
                                        .max_model_len = 8,
                                        .block_size = 4}},
                             *partition, /*cuda=*/nullptr, communicator, threads)
        .status();
  });
  for (const absl::Status& status : statuses) {
    EXPECT_TRUE(absl::IsNotFound(status)) << status;
    EXPECT_NE(status.message().find("whole model on rank 0"), absl::string_view::npos) << status;
    EXPECT_NE(status.message().find(LayerTensor(1, kDownWeight)), absl::string_view::npos);
  }
}

}  // namespace
}  // namespace lockstep
