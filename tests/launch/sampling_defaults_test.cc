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
  file.min_p = 0.05;
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
  EXPECT_EQ(got.params.min_p, 0.0);
  EXPECT_EQ(got.params.repetition_penalty, 1.0);
  EXPECT_FALSE(got.params.ignore_eos);
  EXPECT_TRUE(got.params.stop_token_ids.empty()) << "the engine itself ends at the model's ids";
  EXPECT_EQ(got.summary,
            "sampling: temperature 0.7 (built in), top_p 1 (built in), top_k 0 (built in), "
            "min_p 0 (built in), repetition_penalty 1 (built in), max_tokens 128, end ids [5]");
}

TEST(SamplingDefaults, FileThenFlags) {
  const GenerationConfig file = File();
  EffectiveSampling got = Resolve({}, file, ConfigWithEos({5, 7}));
  EXPECT_EQ(got.params.temperature, 0.1);
  EXPECT_EQ(got.params.top_k, 1);
  EXPECT_EQ(got.params.top_p, 1.0);
  EXPECT_EQ(got.params.min_p, 0.05);
  EXPECT_EQ(got.params.repetition_penalty, 1.05);
  EXPECT_EQ(got.summary,
            "sampling: temperature 0.1 (generation_config.json), top_p 1 (built in), top_k 1 "
            "(generation_config.json), min_p 0.05 (generation_config.json), repetition_penalty "
            "1.05 (generation_config.json), max_tokens 128, end ids [5, 7, 9]");

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
  EXPECT_TRUE(got.params.ignore_eos);
  EXPECT_NE(got.summary.find("end ids ignored"), std::string::npos);
}

TEST(SamplingDefaults, EveryFlagArrives) {
  SamplingFlags flags;
  flags.min_p = 0.5;
  flags.repetition_penalty = 1.25;
  flags.frequency_penalty = 0.5;
  flags.presence_penalty = -0.5;
  flags.logit_bias = {{3, 1.5}};
  flags.max_tokens = 20;
  flags.min_tokens = 4;
  flags.stop_token_ids = {8, 6};
  flags.stop = {"x"};
  flags.num_logprobs = 0;
  flags.num_prompt_logprobs = 2;
  flags.n = 3;
  const EffectiveSampling got = Resolve(flags, File(), ConfigWithEos({5}));
  EXPECT_EQ(got.params.min_p, 0.5);
  EXPECT_EQ(got.params.repetition_penalty, 1.25);
  EXPECT_EQ(got.params.frequency_penalty, 0.5);
  EXPECT_EQ(got.params.presence_penalty, -0.5);
  EXPECT_EQ(got.params.logit_bias, *flags.logit_bias);
  EXPECT_EQ(got.params.max_tokens, 20);
  EXPECT_EQ(got.params.min_tokens, 4);
  EXPECT_EQ(got.params.stop_token_ids, Ids({8, 6}));
  EXPECT_EQ(got.stop, *flags.stop);
  EXPECT_EQ(got.params.num_logprobs, 0);
  EXPECT_EQ(got.params.num_prompt_logprobs, 2);
  EXPECT_EQ(got.params.n, 3);
  EXPECT_NE(got.summary.find("min_p 0.5 (command line), repetition_penalty 1.25 (command line), "
                             "max_tokens 20, frequency_penalty 0.5, presence_penalty -0.5, "
                             "logit_bias of 1 id, min_tokens 4, n 3, stop_token_ids [8, 6], end"),
            std::string::npos)
      << got.summary;
}

TEST(SamplingDefaults, OverridesWinWhereTheySpeak) {
  SamplingFlags base;
  base.temperature = 0.5;
  base.n = 2;
  base.stop = {"a"};
  base.ignore_eos = true;
  SamplingFlags over;
  over.n = 3;
  over.ignore_eos = false;
  over.min_tokens = 1;
  over.stop = std::vector<std::string>();
  const SamplingFlags got = Overridden(base, over);
  EXPECT_EQ(got.temperature, 0.5);
  EXPECT_EQ(got.n, 3);
  EXPECT_EQ(got.min_tokens, 1);
  EXPECT_EQ(got.ignore_eos, false);
  EXPECT_TRUE(got.stop->empty());
  EXPECT_FALSE(got.top_k.has_value());
}

TEST(SamplingDefaults, DoSampleFalseIsGreedy) {
  GenerationConfig file = File();
  file.do_sample = false;
  EXPECT_EQ(Resolve({}, file, {}).params.temperature, 0.0);
  file.do_sample = true;
  EXPECT_EQ(Resolve({}, file, {}).params.temperature, 0.1);
}

TEST(SamplingDefaults, TopKOfMinusOneIsOff) {
  GenerationConfig file;
  file.top_k = -1;
  EXPECT_EQ(Resolve({}, file, {}).params.top_k, 0);
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
  file = GenerationConfig();
  file.min_p = 1.5;
  EXPECT_FALSE(ResolveSampling({}, file, {}).ok());
  flags.min_p = 0.5;
  EXPECT_TRUE(ResolveSampling(flags, file, {}).ok());
  file = GenerationConfig();
  file.repetition_penalty = 0;
  EXPECT_FALSE(ResolveSampling({}, file, {}).ok());
}

}  // namespace
}  // namespace lockstep
