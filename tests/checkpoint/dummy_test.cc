#include "model/checkpoint/dummy.h"

#include <gtest/gtest.h>

#include <cmath>

#include "model/checkpoint/validate.h"
#include "tests/checkpoint/test_files.h"

namespace lockstep {
namespace {

std::vector<float> ReadFloats(const Checkpoint& checkpoint, const std::string& name, Range rows,
                              Range cols) {
  std::vector<float> out(rows.size() * cols.size());
  EXPECT_TRUE(
      checkpoint
          .Read(name, rows, cols, {out.data(), DType::kF32, rows.size(), cols.size(), cols.size()})
          .ok());
  return out;
}

TEST(Dummy, EveryRectangleHoldsTheNumbersOfTheWhole) {
  const ModelConfig config = *ParseModelConfig(TinyQwen3(), "config.json");
  const auto checkpoint = MakeDummyCheckpoint("DIR", config);
  EXPECT_TRUE(ValidateTensors(config, *checkpoint).ok());
  const std::string name = "model.layers.0.mlp.down_proj.weight";  // [64, 96]
  const auto whole = ReadFloats(*checkpoint, name, {0, 64}, {0, 96});
  const auto part = ReadFloats(*checkpoint, name, {10, 50}, {31, 96});
  for (int64_t r = 10; r < 50; ++r) {
    for (int64_t c = 31; c < 96; ++c) {
      ASSERT_EQ(part[(r - 10) * 65 + c - 31], whole[r * 96 + c]);
    }
  }
  EXPECT_EQ(ReadFloats(*MakeDummyCheckpoint("DIR", config), name, {0, 64}, {0, 96}), whole);
  std::vector<BF16> half(96);
  ASSERT_TRUE(checkpoint->Read(name, {3, 4}, {0, 96}, {half.data(), DType::kBF16, 1, 96, 96}).ok());
  for (int64_t c = 0; c < 96; ++c) EXPECT_EQ(half[c].bits, ToBF16(whole[3 * 96 + c]).bits);
}

TEST(Dummy, ValuesLookRandom) {
  Json json = TinyQwen3();
  json["vocab_size"] = 5000;
  const ModelConfig config = *ParseModelConfig(json, "config.json");
  const auto checkpoint = MakeDummyCheckpoint("DIR", config);
  const auto a = ReadFloats(*checkpoint, "model.embed_tokens.weight", {0, 5000}, {0, 64});
  const auto b = ReadFloats(*checkpoint, "lm_head.weight", {0, 5000}, {0, 64});
  double sum = 0, squares = 0, between_tensors = 0, between_rows = 0, between_columns = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    sum += a[i];
    squares += double{a[i]} * a[i];
    between_tensors += double{a[i]} * b[i];
    if (i >= 64) between_rows += double{a[i]} * a[i - 64];
    if (i >= 1) between_columns += double{a[i]} * a[i - 1];
    EXPECT_LE(std::fabs(a[i]), 0.0347f);
  }
  const double n = static_cast<double>(a.size());
  EXPECT_NEAR(sum / n, 0, 0.0002);
  EXPECT_NEAR(std::sqrt(squares / n), 0.02, 0.0002);
  // Correlations of 320000 independent pairs scatter by 1 / sqrt(n) = 0.0018.
  for (const double product : {between_tensors, between_rows, between_columns}) {
    EXPECT_NEAR(product / squares, 0, 0.01);
  }
}

TEST(Dummy, NormsAreOne) {
  const ModelConfig config = *ParseModelConfig(TinyQwen3(), "config.json");
  const auto checkpoint = MakeDummyCheckpoint("DIR", config);
  for (const char* name : {"model.norm.weight", "model.layers.1.input_layernorm.weight",
                           "model.layers.1.self_attn.q_norm.weight"}) {
    for (const float value : ReadFloats(*checkpoint, name, {0, 1}, {0, 32})) {
      EXPECT_EQ(value, 1.0f) << name;
    }
  }
}

}  // namespace
}  // namespace lockstep
