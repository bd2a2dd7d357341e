#include "launch/sampling_defaults.h"

#include <gtest/gtest.h>

namespace lockstep {
namespace {

using Ids = std::vector<int32_t>;

ModelConfig ConfigWithEos(const Ids& eos) {
  ModelConfig config;
  config.eos_token_ids = eos;
  return config;
}

// A generation_config.json with several end ids and values of its own.
GenerationConfig File() {
  GenerationConfig file;
  file.temperature = 0.1;
  file.top_k = 1;
  file.repetition_penalty = 1.05;
  file.eos_token_ids = {5, 9};
  return file;
}

EffectiveSampling Resolve(const SamplingFlags& flags, const GenerationConfig& file,
                          const ModelConfig& config) {
  absl::StatusOr<EffectiveSampling> result = ResolveSampling(flags, file, config);
  EXPECT_TRUE(result.ok()) << result.status();
  return result.ok() ? *result : EffectiveSampling();
}

TEST(SamplingDefaults, BuiltIn) {
  const EffectiveSampling got = Resolve({}, {}, ConfigWithEos({5}));
  EXPECT_EQ(got.params.temperature, 0.7);
  EXPECT_EQ(got.params.top_p, 1.0);
  EXPECT_EQ(got.params.top_k, 0);
  EXPECT_EQ(got.params.max_tokens, 128);
  EXPECT_EQ(got.params.stop_token_ids, Ids({5}));
  EXPECT_EQ(got.summary,
            "sampling: temperature 0.7 (built in), top_p 1 (built in), top_k 0 (built in), "
            "max_tokens 128, end ids [5]");
}

TEST(SamplingDefaults, FileThenFlags) {
  const GenerationConfig file = File();
  EffectiveSampling got = Resolve({}, file, ConfigWithEos({5, 7}));
  EXPECT_EQ(got.params.temperature, 0.1);
  EXPECT_EQ(got.params.top_k, 1);
  EXPECT_EQ(got.params.top_p, 1.0);
  EXPECT_EQ(got.params.stop_token_ids, Ids({5, 7, 9}));
  EXPECT_EQ(got.summary,
            "sampling: temperature 0.1 (generation_config.json), top_p 1 (built in), top_k 1 "
            "(generation_config.json), max_tokens 128, end ids [5, 7, 9]");
  ASSERT_EQ(got.warnings.size(), 1u);
  EXPECT_NE(got.warnings[0].find("repetition_penalty 1.05"), std::string::npos);

  SamplingFlags flags;
  flags.temperature = 0;
  flags.top_k = 3;
  flags.top_p = 0.5;
  flags.seed = 11;
  flags.ignore_eos = true;
  got = Resolve(flags, file, ConfigWithEos({5, 7}));
  EXPECT_EQ(got.params.temperature, 0.0);
  EXPECT_EQ(got.params.top_k, 3);
  EXPECT_EQ(got.params.top_p, 0.5);
  EXPECT_EQ(got.params.seed, 11u);
  EXPECT_TRUE(got.params.stop_token_ids.empty());
}

TEST(SamplingDefaults, DoSampleFalseIsGreedy) {
  GenerationConfig file = File();
  file.do_sample = false;
  EXPECT_EQ(Resolve({}, file, {}).params.temperature, 0.0);
  file.do_sample = true;
  EXPECT_EQ(Resolve({}, file, {}).params.temperature, 0.1);
}

TEST(SamplingDefaults, NeutralAndUnappliedValues) {
  GenerationConfig file;
  file.repetition_penalty = 1.0;
  file.min_p = 0.0;
  file.top_k = -1;
  EffectiveSampling got = Resolve({}, file, {});
  EXPECT_TRUE(got.warnings.empty());
  EXPECT_EQ(got.params.top_k, 0);
  file.min_p = 0.05;
  got = Resolve({}, file, {});
  ASSERT_EQ(got.warnings.size(), 1u);
  EXPECT_NE(got.warnings[0].find("min_p 0.05"), std::string::npos);
}

TEST(SamplingDefaults, IllegalFileValuesAreNamedUnlessOverridden) {
  GenerationConfig file;
  file.temperature = -1;
  const absl::StatusOr<EffectiveSampling> got = ResolveSampling({}, file, {});
  ASSERT_FALSE(got.ok());
  EXPECT_EQ(got.status().message(),
            "generation_config.json: temperature is -1, it must be a finite number of 0 or more; "
            "pass the option, or --generation-config none");
  SamplingFlags flags;
  flags.temperature = 1;
  EXPECT_TRUE(ResolveSampling(flags, file, {}).ok());
  file = GenerationConfig();
  file.top_p = 0;
  EXPECT_FALSE(ResolveSampling({}, file, {}).ok());
}

}  // namespace
}  // namespace lockstep
