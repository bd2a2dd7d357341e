#include "launch/plan_command.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "attention/cpu_backend.h"
#include "gtest/gtest.h"
#include "model/checkpoint/dummy.h"
#include "model/decoder.h"
#include "parallel/local_communicator.h"
#include "runtime/core/file.h"
#include "runtime/core/json.h"

namespace lockstep {

namespace {

// SmolLM2-135M's shape: 9 query heads, 3 KV heads, tied embeddings.
ModelConfig Smol() {
  ModelConfig config;
  config.model_type = "llama";
  config.hidden_size = 576;
  config.intermediate_size = 1536;
  config.num_layers = 30;
  config.num_query_heads = 9;
  config.num_kv_heads = 3;
  config.head_dim = 64;
  config.vocab_size = 49152;
  config.max_position_embeddings = 8192;
  config.tie_word_embeddings = true;
  config.layer_windows.assign(30, 0);
  config.dtype = DType::kBF16;
  return config;
}

ModelPlan Plan(const ModelConfig& config, const PlanOptions& options) {
  const absl::StatusOr<ModelPlan> plan = MakePlan(config, options);
  EXPECT_TRUE(plan.ok()) << plan.status();
  return plan.ok() ? *plan : ModelPlan();
}

TEST(PlanCommandTest, WeightBytesOfOneRankAreTheParameters) {
  // 134,515,008 parameters (the model card), of which 61 norms of 576 are held in float32.
  const ModelPlan plan = Plan(Smol(), {});
  EXPECT_EQ(plan.dtype, DType::kBF16);
  EXPECT_EQ(plan.ranks[0].weight_bytes, 134515008 * 2 + 61 * 576 * 2);
  EXPECT_EQ(Plan(Smol(), {.dtype = DType::kF32}).ranks[0].weight_bytes, 134515008 * 4);
  EXPECT_EQ(plan.ranks[0].kv_bytes_per_token, 2 * 30 * 3 * 64 * 2);
  EXPECT_FALSE(plan.tokens.has_value());
}

TEST(PlanCommandTest, ReplicatedKvHeads) {
  ModelConfig config = Smol();
  config.num_query_heads = 8;
  config.num_kv_heads = 2;
  config.head_dim = 16;
  for (const int n : {1, 2, 4, 8}) {
    const ModelPlan plan = Plan(config, {.tp_size = n, .dtype = DType::kF32});
    for (const RankPlan& rank : plan.ranks) {
      EXPECT_EQ(rank.kv_bytes_per_token, std::max(1, 2 / n) * 16 * 2 * 30 * 4);
    }
  }
}

TEST(PlanCommandTest, TokensAreWholeBlocksAndTheMinimumOverRanks) {
  const ModelPlan plan = Plan(Smol(), {.tp_size = 2, .memory_gib = 0.25, .block_size = 16});
  int64_t least = INT64_MAX;
  for (const RankPlan& rank : plan.ranks) {
    const int64_t free = (int64_t{1} << 28) - rank.weight_bytes;
    const int64_t blocks = free / (16 * rank.kv_bytes_per_token);
    ASSERT_GT(blocks, 0);
    EXPECT_EQ(*rank.tokens, blocks * 16);
    least = std::min(least, *rank.tokens);
  }
  EXPECT_EQ(*plan.tokens, least);
  EXPECT_EQ(*Plan(Smol(), {.memory_gib = 0.1}).tokens, 0);
}

// The engine's rule: the memory of the host is shared by its ranks.
TEST(PlanCommandTest, KvMemoryOfTheHost) {
  const int64_t bytes = int64_t{100} << 20;
  const PlanOptions options = {.tp_size = 3, .kv_cache_memory_bytes = bytes, .block_size = 16};
  const ModelPlan plan = Plan(Smol(), options);
  for (const RankPlan& rank : plan.ranks) {
    EXPECT_EQ(*rank.tokens, bytes / 3 / (16 * 2 * 30 * 1 * 64 * 2) * 16);
  }
  EXPECT_EQ(*plan.tokens, *plan.ranks[0].tokens);
  EXPECT_GT(*plan.tokens, 0);
  EXPECT_NE(FormatPlan(plan, options).find("bytes of KV memory for 3 ranks"), std::string::npos);
}

TEST(PlanCommandTest, Refusals) {
  const auto message = [](const PlanOptions& options) {
    return std::string(MakePlan(Smol(), options).status().message());
  };
  EXPECT_NE(message({.tp_size = 10}).find("10 ranks"), std::string::npos);
  EXPECT_NE(message({.tp_size = 10}).find("9 query heads"), std::string::npos);
  EXPECT_NE(message({.tp_size = 0}), "");
  EXPECT_NE(message({.memory_gib = -1.0}).find("-1"), std::string::npos);
  EXPECT_NE(message({.memory_gib = 1e300}), "");
  EXPECT_NE(message({.block_size = 0}), "");
  EXPECT_NE(message({.kv_cache_memory_bytes = 0}), "");
  EXPECT_NE(message({.memory_gib = 1.0, .kv_cache_memory_bytes = 1}), "");
}

TEST(PlanCommandTest, AnFp8CacheTakesHalfTheBytesOfBfloat16) {
  const ModelPlan plan = Plan(Smol(), {});
  const ModelPlan fp8 = Plan(Smol(), {.kv_cache_dtype = DType::kF8E4M3});
  EXPECT_EQ(fp8.dtype, DType::kBF16);
  EXPECT_EQ(fp8.ranks[0].weight_bytes, plan.ranks[0].weight_bytes);
  EXPECT_EQ(2 * fp8.ranks[0].kv_bytes_per_token, plan.ranks[0].kv_bytes_per_token);
}

TEST(PlanCommandTest, JsonIsOneLineThatCoversTheModel) {
  const PlanOptions options = {.model = "m", .tp_size = 2, .memory_gib = 1.0, .json = true};
  const std::string text = FormatPlan(Plan(Smol(), options), options);
  EXPECT_EQ(text.find('\n'), text.size() - 1);
  const auto json = ParseJson(text, "the plan");
  ASSERT_TRUE(json.ok()) << json.status();
  EXPECT_EQ(json->at("tp_size"), 2);
  EXPECT_EQ(json->at("dtype"), "bfloat16");
  EXPECT_EQ(json->at("kv_cache_dtype"), "bfloat16");
  const Json& ranks = json->at("ranks");
  ASSERT_EQ(ranks.size(), 2u);
  EXPECT_EQ(ranks[0].at("query_heads"), Json({0, 5}));
  EXPECT_EQ(ranks[0].at("kv_heads"), Json({0, 2}));
  EXPECT_EQ(ranks[1].at("query_heads"), Json({5, 9}));
  EXPECT_EQ(ranks[1].at("kv_heads"), Json({1, 3}));
  EXPECT_EQ(ranks[1].at("intermediate_rows"), Json({768, 1536}));
  EXPECT_EQ(ranks[1].at("vocab_rows"), Json({24576, 49152}));
  EXPECT_EQ(json->at("weight_bytes"), ranks[0].at("weight_bytes").get<int64_t>() +
                                          ranks[1].at("weight_bytes").get<int64_t>());
  EXPECT_EQ(json->at("tokens"),
            std::min(ranks[0].at("tokens").get<int64_t>(), ranks[1].at("tokens").get<int64_t>()));
}

TEST(PlanCommandTest, TableShowsEveryRank) {
  const PlanOptions options = {.model = "m", .tp_size = 3, .memory_gib = 1.0};
  const std::string text = FormatPlan(Plan(Smol(), options), options);
  EXPECT_NE(text.find("6-8 (3)"), std::string::npos) << text;
  EXPECT_NE(text.find("tokens that fit"), std::string::npos) << text;
}

// The decoder's own count, for every part that makes a difference.
TEST(PlanCommandTest, WeightBytesEqualTheDecoders) {
  ModelConfig config = Smol();
  config.hidden_size = 48;
  config.intermediate_size = 100;
  config.num_layers = 2;
  config.head_dim = 16;
  config.vocab_size = 131;
  config.layer_windows.assign(2, 0);
  config.max_position_embeddings = 64;
  for (const int variant : {0, 1, 2, 3}) {
    config.qkv_bias = variant == 1 || variant == 3;
    config.o_bias = config.mlp_bias = variant == 3;
    config.qk_norm = variant == 2 || variant == 3;
    config.tie_word_embeddings = variant % 2 == 0;
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      ModelSource source;
      source.config = config;
      source.checkpoint = MakeDummyCheckpoint("dummy", config);
      const ModelPlan plan = Plan(config, {.tp_size = 4, .dtype = dtype});
      const auto parts = PartitionModel(config.Dims(), 4);
      const auto statuses = RunLocalRanks(4, [&](Communicator& communicator) -> absl::Status {
        ThreadPool threads(1);
        const auto backend = CpuBackend::Create(threads);
        const DecoderOptions options = {
            .dtype = dtype, .max_num_batched_tokens = 8, .max_model_len = 64};
        LOCKSTEP_ASSIGN_OR_RETURN(
            const auto decoder,
            Decoder::Load(source, *parts, options, *backend, communicator, threads));
        EXPECT_EQ(plan.ranks[communicator.rank()].weight_bytes, decoder->weight_bytes());
        return absl::OkStatus();
      });
      for (const absl::Status& status : statuses) EXPECT_TRUE(status.ok()) << status;
    }
  }
}

TEST(PlanCommandTest, PublishedShapes) {
  const char* env = std::getenv("LOCKSTEP_SHARED");
  const std::filesystem::path shared = env != nullptr ? env : LOCKSTEP_SOURCE_DIR "/../shared";
  const std::filesystem::path path = shared / "configs/Llama-3.1-70B";
  if (!std::filesystem::is_directory(path)) GTEST_SKIP() << "no " << path;
  const auto config = OpenModelConfig(path.string());
  ASSERT_TRUE(config.ok()) << config.status();
  const ModelPlan plan = Plan(*config, {.tp_size = 8, .memory_gib = 80.0});
  int64_t parameters = 0;  // norms, in float32 on every rank, are 161 * 8192 values
  for (const RankPlan& rank : plan.ranks) parameters += (rank.weight_bytes - 161 * 8192 * 4) / 2;
  EXPECT_EQ(parameters + 161 * 8192, 70553706496);  // the published count
  EXPECT_EQ(plan.ranks[0].kv_bytes_per_token, 2 * 80 * 1 * 128 * 2);
}

// Worked out by hand for a device of round numbers.
TEST(PredictTest, TheFormula) {
  const DeviceRates rates = {.name = "round",
                             .memory_bytes = 1e9,
                             .weight_bytes_per_second = 1e12,
                             .kv_bytes_per_second = 5e11,
                             .product_flops = 1e14,
                             .attention_flops = 5e13,
                             .sum_seconds = 1e-5,
                             .link_bytes_per_second = 1e11,
                             .step_seconds = 1e-4};
  const StepCost cost = {.weight_bytes = 2e9,
                         .kv_bytes = 1e8,
                         .product_flops = 1e11,
                         .attention_flops = 2e10,
                         .num_sums = 10,
                         .sum_bytes = 1e6};
  const StepPrediction step = PredictStep(cost, 4, rates);
  EXPECT_DOUBLE_EQ(step.products, 2e-3);
  EXPECT_DOUBLE_EQ(step.attention, 4e-4);
  EXPECT_DOUBLE_EQ(step.sums, 10 * (1e-5 + 1.5 * 1e6 / 1e11));
  EXPECT_DOUBLE_EQ(step.rest, 1e-4);
  EXPECT_DOUBLE_EQ(step.total(), 2e-3 + 4e-4 + 2.5e-4 + 1e-4);
}

TEST(PredictTest, OneRowForEachNumberOfRanks) {
  const absl::StatusOr<DeviceRates> rates = ReadDeviceRates("h200");
  ASSERT_TRUE(rates.ok()) << rates.status();
  const std::vector<Prediction> predictions =
      Predict(Smol(), DType::kBF16, DType::kBF16, {.device = "h200"}, *rates);
  ASSERT_EQ(predictions.size(), 9u);  // query heads
  for (size_t i = 0; i < predictions.size(); ++i) {
    const Prediction& one = predictions[i];
    const ModelPlan plan = Plan(Smol(), {.tp_size = static_cast<int>(i) + 1});
    EXPECT_EQ(one.tp_size, static_cast<int>(i) + 1);
    ASSERT_TRUE(one.decode_one && one.decode_batch && one.prefill);
    EXPECT_EQ(one.decode_one->sums > 0, i > 0);
    int64_t most = 0;
    for (const RankPlan& rank : plan.ranks) most = std::max(most, rank.weight_bytes);
    EXPECT_EQ(one.weight_bytes, most);
    EXPECT_GT(one.kv_tokens, 0);
  }
  DeviceRates small = *rates;
  small.memory_bytes = 1e8;
  const Prediction none = Predict(Smol(), DType::kBF16, DType::kBF16, {}, small)[0];
  EXPECT_EQ(none.kv_tokens, 0);
  EXPECT_FALSE(none.decode_one || none.decode_batch || none.prefill);
  // One request fits, many do not.
  PredictOptions many;
  many.batch_size = 1 << 20;
  many.context = 8192;
  const Prediction some = Predict(Smol(), DType::kBF16, DType::kBF16, many, *rates)[0];
  EXPECT_TRUE(some.decode_one && some.prefill);
  EXPECT_FALSE(some.decode_batch);
}

TEST(PredictTest, DescriptionsAreCheckedByName) {
  const auto message = [](const std::string& text) {
    const std::string path = ::testing::TempDir() + "/gpu.json";
    std::ofstream(path) << text;
    return std::string(ReadDeviceRates(path).status().message());
  };
  const std::string rest =
      R"("weight_bytes_per_second":1,"kv_bytes_per_second":1,"product_flops":1,"attention_flops":1,)"
      R"("sum_seconds":0,"link_bytes_per_second":1,"step_seconds":0)";
  EXPECT_EQ(message(R"({"memory_bytes":1,)" + rest + "}"), "");
  EXPECT_NE(message("{" + rest + "}").find("memory_bytes"), std::string::npos);
  EXPECT_NE(message(R"({"memory_bytes":0,)" + rest + "}").find("memory_bytes must be 1 or more"),
            std::string::npos);
  EXPECT_NE(message(R"({"memory_bytes":1,"speed":3,)" + rest + "}").find("unknown key speed"),
            std::string::npos);
  EXPECT_NE(message("[]").find("JSON object"), std::string::npos);
  EXPECT_NE(std::string(ReadDeviceRates("/no/such").status().message()).find("built in: h200"),
            std::string::npos);
}

}  // namespace

}  // namespace lockstep
