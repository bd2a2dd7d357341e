#include "model/rope.h"

#include <gtest/gtest.h>

#include <cmath>

namespace lockstep {
namespace {

RotaryEmbedding Make(const RopeConfig& config, int64_t head_dim) {
  absl::StatusOr<RotaryEmbedding> rope = RotaryEmbedding::Create(config, head_dim);
  EXPECT_TRUE(rope.ok()) << rope.status();
  return *std::move(rope);
}

RopeConfig Llama3(double factor) {
  RopeConfig config;
  config.type = RopeType::kLlama3;
  config.theta = 500000;
  config.factor = factor;
  config.low_freq_factor = 1;
  config.high_freq_factor = 4;
  config.original_max_position_embeddings = 8192;
  return config;
}

// Values that Hugging Face transformers gives, to 9 digits: equal within two units in the last
// place of float32.
void ExpectFrequency(float actual, double expected) {
  EXPECT_NEAR(actual, expected, expected * 2.4e-7) << expected;
}

TEST(RopeTest, Llama3KeepsBlendsAndDivides) {
  RopeConfig plain;
  plain.theta = 500000;
  for (const auto& [head_dim, factor, kept, blended] :
       {std::tuple{64, 32.0, 15, 18}, std::tuple{128, 8.0, 29, 35}}) {
    const std::vector<float> base = Make(plain, head_dim).InvFreq(1);
    const std::vector<float> scaled = Make(Llama3(factor), head_dim).InvFreq(1);
    ASSERT_EQ(scaled.size(), static_cast<size_t>(head_dim / 2));
    for (int i = 0; i < head_dim / 2; ++i) {
      const float divided = base[i] / static_cast<float>(factor);
      if (i < kept) {
        EXPECT_EQ(scaled[i], base[i]) << i;
      } else if (i >= blended) {
        EXPECT_EQ(scaled[i], divided) << i;
      } else {
        EXPECT_LT(scaled[i], base[i]) << i;
        EXPECT_GT(scaled[i], divided) << i;
      }
    }
  }
  const std::vector<float> small = Make(Llama3(32), 64).InvFreq(1);
  ExpectFrequency(small[15], 1.29054793e-03);
  ExpectFrequency(small[17], 9.70828780e-05);
  ExpectFrequency(small[18], 1.94616382e-05);
  ExpectFrequency(small[31], 9.41830673e-08);
  const std::vector<float> large = Make(Llama3(8), 128).InvFreq(1);
  ExpectFrequency(large[29], 2.16657076e-03);
  ExpectFrequency(large[34], 1.78507813e-04);
  ExpectFrequency(large[63], 3.06892599e-07);
}

TEST(RopeTest, LinearDividesEveryFrequency) {
  RopeConfig config;
  const std::vector<float> plain = Make(config, 128).InvFreq(1);
  config.type = RopeType::kLinear;
  config.factor = 4;
  const std::vector<float> linear = Make(config, 128).InvFreq(1);
  for (size_t i = 0; i < plain.size(); ++i) EXPECT_EQ(linear[i], plain[i] / 4);
}

TEST(RopeTest, FrequencyFactorsOfAFileDivideTheirPair) {
  RopeConfig config;
  const std::vector<float> plain = Make(config, 8).InvFreq(1);
  config.freq_factors = {1, 2, 4, 8};
  const std::vector<float> divided = Make(config, 8).InvFreq(1);
  for (size_t i = 0; i < plain.size(); ++i)
    EXPECT_EQ(divided[i], plain[i] / config.freq_factors[i]);
}

RopeConfig Dynamic() {
  RopeConfig config;
  config.type = RopeType::kDynamic;
  config.factor = 2;
  config.original_max_position_embeddings = 4096;
  return config;
}

TEST(RopeTest, DynamicBaseFollowsTheLengthBeyondTheTrainedOne) {
  const RotaryEmbedding rope = Make(Dynamic(), 128);
  EXPECT_EQ(rope.Base(100), 10000.0);
  EXPECT_EQ(rope.Base(512), 10000.0);
  EXPECT_EQ(rope.Base(4096), 10000.0);
  EXPECT_NEAR(rope.Base(4097), 10004.9603, 1e-4);
  EXPECT_NEAR(rope.Base(8192), 30527.7367, 1e-4);
  EXPECT_EQ(rope.InvFreq(4096), Make(RopeConfig(), 128).InvFreq(1));
  EXPECT_LT(rope.InvFreq(8192)[63], rope.InvFreq(4096)[63]);
}

TEST(RopeTest, DynamicAnglesBelongToTheTokensOwnSequence) {
  const RotaryEmbedding rope = Make(Dynamic(), 128);
  const RotaryEmbedding plain = Make(RopeConfig(), 128);
  const std::vector<int32_t> positions = {99, 7999, 99, 5000, 7999};
  const std::vector<int32_t> lengths = {100, 8000, 8000, 8000, 100};
  std::vector<float> cos(5 * 64), sin(5 * 64), plain_cos(5 * 64), plain_sin(5 * 64);
  rope.FillCosSin(positions, lengths, 0, 5, cos.data(), sin.data());
  plain.FillCosSin(positions, lengths, 0, 5, plain_cos.data(), plain_sin.data());
  for (int t : {0, 4}) {  // up to the trained length: as without scaling, whatever stands beside
    for (int i = 0; i < 64; ++i) {
      EXPECT_EQ(cos[t * 64 + i], plain_cos[t * 64 + i]);
      EXPECT_EQ(sin[t * 64 + i], plain_sin[t * 64 + i]);
    }
  }
  const std::vector<float> stretched = rope.InvFreq(8000);
  for (int t : {1, 2, 3}) {
    for (int i = 0; i < 64; ++i) {
      const float angle = static_cast<float>(positions[t]) * stretched[i];
      EXPECT_NEAR(cos[t * 64 + i], std::cos(static_cast<double>(angle)), 1e-7);
      EXPECT_NEAR(sin[t * 64 + i], std::sin(static_cast<double>(angle)), 1e-7);
    }
  }
}

// From the formulae of YaRN in double precision, written out for one case: D = 8, theta 10000,
// trained on 64, factor 4. dim(turns) = 8 * ln(64 / (2 pi turns)) / (2 ln 10000): -0.50 for 32
// turns and 1.008 for one, so the ramp goes from 0 to 2: shares 0, 1/2, 1, 1.
TEST(RopeTest, YarnRampAndAttentionFactor) {
  RopeConfig config;
  config.type = RopeType::kYarn;
  config.factor = 4;
  config.original_max_position_embeddings = 64;
  const RotaryEmbedding rope = Make(config, 8);
  const std::vector<float> inv_freq = rope.InvFreq(1);
  const double expected[] = {1.0, 0.1 * 0.5 + 0.1 / 4 * 0.5, 0.01 / 4, 0.001 / 4};
  for (int i = 0; i < 4; ++i) ExpectFrequency(inv_freq[i], expected[i]);
  EXPECT_FLOAT_EQ(rope.attention_factor(), 0.1 * std::log(4.0) + 1);

  config.truncate = false;  // the ramp ends at 1.008: pair 1 has share 0.992
  const double high = 8 * std::log(64 / (2 * M_PI)) / (2 * std::log(10000.0));
  ExpectFrequency(Make(config, 8).InvFreq(1)[1], 0.1 * (1 - 1 / high) + 0.1 / 4 * (1 / high));

  config.mscale = 0.707;
  config.mscale_all_dim = 0.5;
  EXPECT_FLOAT_EQ(Make(config, 8).attention_factor(),
                  (0.0707 * std::log(4.0) + 1) / (0.05 * std::log(4.0) + 1));
  config.attention_factor = 1.25;
  const RotaryEmbedding given = Make(config, 8);
  EXPECT_EQ(given.attention_factor(), 1.25f);
  const std::vector<int32_t> zero = {0};
  std::vector<float> cos(4), sin(4);
  given.FillCosSin(zero, zero, 0, 1, cos.data(), sin.data());
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(cos[i], 1.25f);
    EXPECT_EQ(sin[i], 0.0f);
  }
}

TEST(RopeTest, PartialRotationHasFewerPairs) {
  RopeConfig config;
  config.partial_rotary_factor = 0.5;
  const RotaryEmbedding rope = Make(config, 128);
  EXPECT_EQ(rope.rotary_dim(), 64);
  EXPECT_EQ(rope.InvFreq(1), Make(RopeConfig(), 64).InvFreq(1));
}

// A Llama config of head_dim 128 with `extra` keys.
RotaryEmbedding FromJson(const Json& extra) {
  Json json = {{"architectures", {"LlamaForCausalLM"}},
               {"model_type", "llama"},
               {"hidden_size", 256},
               {"intermediate_size", 512},
               {"num_hidden_layers", 1},
               {"num_attention_heads", 2},
               {"num_key_value_heads", 2},
               {"head_dim", 128},
               {"vocab_size", 64},
               {"max_position_embeddings", 4096}};
  json.update(extra);
  absl::StatusOr<ModelConfig> config = ParseModelConfig(json, "config.json");
  EXPECT_TRUE(config.ok()) << config.status();
  return Make(config->rope, config->head_dim);
}

TEST(RopeTest, SpellingsOfOneConfigGiveTheSameBits) {
  const std::vector<float> expected = FromJson({{"rope_theta", 1000000}}).InvFreq(1);
  RopeConfig plain;
  plain.theta = 1e6;
  EXPECT_EQ(expected, Make(plain, 128).InvFreq(1));
  const Json inside = {{"rope_type", "default"}, {"rope_theta", 1000000}};
  const Json without = {{"rope_type", "default"}};
  const std::vector<Json> spellings = {
      {{"rope_theta", 1000000.0}},
      {{"rope_parameters", inside}},
      {{"rope_theta", 1000000.0}, {"rope_parameters", inside}},
      {{"rope_theta", 1000000}, {"rope_parameters", without}},
      {{"rope_theta", 500}, {"rope_parameters", inside}},  // a conflict: rope_parameters wins
  };
  for (const Json& spelling : spellings) {
    EXPECT_EQ(FromJson(spelling).InvFreq(1), expected) << spelling.dump();
  }
}

TEST(RopeTest, PartialRotationAndLegacyTypeKey) {
  const Json inside = {
      {"rope_type", "default"}, {"rope_theta", 10000.0}, {"partial_rotary_factor", 0.5}};
  const RotaryEmbedding top = FromJson({{"rope_theta", 10000}, {"partial_rotary_factor", 0.5}});
  EXPECT_EQ(top.rotary_dim(), 64);
  EXPECT_EQ(FromJson({{"rope_parameters", inside}}).rotary_dim(), 64);
  EXPECT_EQ(FromJson({{"rope_parameters", inside}}).InvFreq(1), top.InvFreq(1));
  Json scaling = {{"factor", 8.0},
                  {"low_freq_factor", 1.0},
                  {"high_freq_factor", 4.0},
                  {"original_max_position_embeddings", 8192}};
  scaling["rope_type"] = "llama3";
  const std::vector<float> current =
      FromJson({{"rope_theta", 500000.0}, {"rope_scaling", scaling}}).InvFreq(1);
  scaling.erase("rope_type");
  scaling["type"] = "llama3";
  EXPECT_EQ(FromJson({{"rope_theta", 500000.0}, {"rope_scaling", scaling}}).InvFreq(1), current);
  EXPECT_EQ(current, Make(Llama3(8), 128).InvFreq(1));
}

TEST(RopeTest, DynamicOfAConfigIsTrainedOnItsMaxPositions) {
  const RotaryEmbedding rope = FromJson(
      {{"rope_theta", 10000.0}, {"rope_scaling", {{"rope_type", "dynamic"}, {"factor", 2}}}});
  EXPECT_EQ(rope.Base(4096), 10000.0);
  EXPECT_NEAR(rope.Base(4097), 10004.9603, 1e-4);
  EXPECT_NEAR(rope.Base(8192), 30527.7367, 1e-4);
}

TEST(RopeTest, RefusesNumbersThatMakeNoFrequencies) {
  RopeConfig config;
  config.partial_rotary_factor = 0.01;
  EXPECT_EQ(RotaryEmbedding::Create(config, 64).status().code(),
            absl::StatusCode::kInvalidArgument);
  config = Dynamic();
  config.original_max_position_embeddings = 0;
  EXPECT_FALSE(RotaryEmbedding::Create(config, 64).ok());
  config = Llama3(0);
  EXPECT_FALSE(RotaryEmbedding::Create(config, 64).ok());
  config = RopeConfig();
  config.freq_factors = {1, 1, 1};
  EXPECT_FALSE(RotaryEmbedding::Create(config, 64).ok());
}

}  // namespace
}  // namespace lockstep
