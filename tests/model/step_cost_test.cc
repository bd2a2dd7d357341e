#include "model/step_cost.h"

#include "gtest/gtest.h"

namespace lockstep {
namespace {

// Qwen2.5-7B's shape.
ModelConfig Qwen() {
  ModelConfig config;
  config.model_type = "qwen2";
  config.hidden_size = 3584;
  config.intermediate_size = 18944;
  config.num_layers = 28;
  config.num_query_heads = 28;
  config.num_kv_heads = 4;
  config.head_dim = 128;
  config.vocab_size = 152064;
  config.layer_windows.assign(28, 0);
  return config;
}

StepCost Cost(const ModelConfig& config, const UniformBatch& batch, int tp_size = 1, int rank = 0) {
  const auto parts = PartitionModel(config.Dims(), tp_size);
  EXPECT_TRUE(parts.ok()) << parts.status();
  return CostOfStep(config, (*parts)[static_cast<size_t>(rank)], tp_size, DType::kBF16,
                    DType::kBF16, batch);
}

TEST(StepCostTest, DecodeOfOneRequest) {
  const StepCost cost = Cost(Qwen(), {.seq_len = 512});
  // qkv 4608, o 3584, gate and up 37888 rows of 3584, down 3584 of 18944; the head.
  const double weights = 28.0 * (3584.0 * (4608 + 3584 + 37888) + 3584.0 * 18944) + 152064.0 * 3584;
  EXPECT_EQ(cost.weight_bytes, weights * 2);
  EXPECT_EQ(cost.product_flops, weights * 2);
  EXPECT_EQ(cost.kv_bytes, 28.0 * 512 * 2 * 4 * 128 * 2);
  EXPECT_EQ(cost.attention_flops, 28.0 * 512 * 4 * 28 * 128);
  EXPECT_EQ(cost.num_sums, 0);
  EXPECT_EQ(cost.sum_bytes, 0);
}

TEST(StepCostTest, APromptHasOneRowOfTheHead) {
  const StepCost cost = Cost(Qwen(), {.requests = 2, .query_len = 100, .seq_len = 100});
  const double layers = 28.0 * (3584.0 * (4608 + 3584 + 37888) + 3584.0 * 18944);
  EXPECT_EQ(cost.product_flops, 2 * (200 * layers + 2 * 152064.0 * 3584));
  EXPECT_EQ(cost.attention_flops, 28.0 * 2 * 5050 * 4 * 28 * 128);
}

// What ranks share out adds up to the whole: query heads and rows, not KV heads that two hold.
TEST(StepCostTest, RanksAddUp) {
  const UniformBatch batch = {.requests = 3, .query_len = 5, .seq_len = 40};
  const StepCost whole = Cost(Qwen(), batch);
  for (const int n : {2, 3, 4}) {
    double flops = 0, kv = 0;
    for (int rank = 0; rank < n; ++rank) {
      const StepCost one = Cost(Qwen(), batch, n, rank);
      flops += one.attention_flops;
      kv += one.kv_bytes;
      EXPECT_EQ(one.num_sums, 57);
      EXPECT_EQ(one.sum_bytes, 15.0 * 3584 * 2);
    }
    EXPECT_EQ(flops, whole.attention_flops);
    if (n != 3) {
      EXPECT_EQ(kv, whole.kv_bytes);
    } else {
      EXPECT_GT(kv, whole.kv_bytes);
    }
  }
}

// Counted one by one.
TEST(StepCostTest, WindowsLeaveOutWhatNobodySees) {
  for (const int64_t window : {0, 1, 7, 30, 64, 100}) {
    for (const int64_t query_len : {1, 5, 40}) {
      ModelConfig config = Qwen();
      config.num_layers = 1;
      config.layer_windows = {window};
      const int64_t seq_len = 40;
      double pairs = 0;
      int64_t first = seq_len;
      for (int64_t q = seq_len - query_len; q < seq_len; ++q) {
        for (int64_t k = 0; k <= q; ++k) {
          if (window > 0 && k <= q - window) continue;
          ++pairs;
          first = std::min(first, k);
        }
      }
      const StepCost cost = Cost(config, {.query_len = query_len, .seq_len = seq_len});
      EXPECT_EQ(cost.attention_flops, pairs * 4 * 28 * 128) << window << " " << query_len;
      EXPECT_EQ(cost.kv_bytes, static_cast<double>(seq_len - first) * 2 * 4 * 128 * 2)
          << window << " " << query_len;
    }
  }
}

}  // namespace
}  // namespace lockstep
