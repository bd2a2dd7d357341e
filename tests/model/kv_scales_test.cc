#include "model/kv_scales.h"

#include <gtest/gtest.h>

#include <cmath>

#include "tests/model/memory_checkpoint.h"

namespace lockstep {
namespace {

ModelConfig TwoLayers() {
  ModelConfig config;
  config.num_layers = 2;
  return config;
}

TEST(KvScalesTest, AreOneWhereTheCheckpointHasNone) {
  const MemoryCheckpoint checkpoint(TwoLayers());
  const auto scales = ReadKvScales(checkpoint, 2);
  ASSERT_TRUE(scales.ok()) << scales.status();
  EXPECT_EQ(scales->keys, std::vector<float>({1, 1}));
  EXPECT_EQ(scales->values, std::vector<float>({1, 1}));
  EXPECT_EQ(scales->ToString(), "fp8 KV cache: scales are 1, the checkpoint has none");
}

TEST(KvScalesTest, AreReadByBothNamesAndAppliedToThePool) {
  MemoryCheckpoint checkpoint(TwoLayers());
  checkpoint.Add("model.layers.0.self_attn.k_scale", {1}, {0.5f});
  checkpoint.Add("model.layers.0.self_attn.v_scale", {1}, {0.25f});
  checkpoint.Add("model.layers.1.self_attn.attn.v_scale", {1}, {2});
  auto scales = ReadKvScales(checkpoint, 2);
  ASSERT_TRUE(scales.ok()) << scales.status();
  EXPECT_EQ(scales->keys, std::vector<float>({0.5f, 1}));
  EXPECT_EQ(scales->values, std::vector<float>({0.25f, 2}));
  EXPECT_EQ(scales->ToString(),
            "fp8 KV cache: 3 of 4 scales from the checkpoint, the others are 1");
  auto pool = KvPool::Create(
      {.num_layers = 2, .num_kv_heads = 1, .head_dim = 4, .block_size = 2, .dtype = DType::kF8E4M3},
      1);
  ASSERT_TRUE(pool.ok());
  scales->ApplyTo(*pool);
  EXPECT_EQ(pool->Layer(0).k_scale, 0.5f);
  EXPECT_EQ(pool->Layer(1).v_scale, 2);
  checkpoint.Add("model.layers.1.self_attn.attn.k_scale", {1}, {1});
  scales = ReadKvScales(checkpoint, 2);
  ASSERT_TRUE(scales.ok());
  EXPECT_EQ(scales->ToString(), "fp8 KV cache: scales of all layers from the checkpoint");
}

TEST(KvScalesTest, RefusesWhatIsNoScaleByName) {
  for (const float value : {0.0f, -1.0f, NAN, INFINITY}) {
    MemoryCheckpoint checkpoint(TwoLayers());
    checkpoint.Add("model.layers.1.self_attn.k_scale", {1}, {value});
    const absl::Status status = ReadKvScales(checkpoint, 2).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find("model.layers.1.self_attn.k_scale"), std::string::npos);
  }
  MemoryCheckpoint checkpoint(TwoLayers());
  checkpoint.Add("model.layers.1.self_attn.v_scale", {4}, {1, 1, 1, 1});
  EXPECT_EQ(ReadKvScales(checkpoint, 2).status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace lockstep
