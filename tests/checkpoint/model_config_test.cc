#include "model/model_config.h"

#include <gtest/gtest.h>

#include "tests/checkpoint/test_files.h"

namespace lockstep {
namespace {

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;

Json Tiny(const std::string& model_type) {
  const std::map<std::string, std::string> architectures = {{"llama", "LlamaForCausalLM"},
                                                            {"mistral", "MistralForCausalLM"},
                                                            {"qwen2", "Qwen2ForCausalLM"},
                                                            {"qwen3", "Qwen3ForCausalLM"}};
  Json json = TinyQwen3();
  json["model_type"] = model_type;
  json["architectures"] = Json::array({architectures.at(model_type)});
  return json;
}

absl::StatusOr<ModelConfig> Parse(const Json& json) { return ParseModelConfig(json, "DIR"); }

// Parses with `key` set to `value`.
absl::StatusOr<ModelConfig> ParseWith(Json json, const std::string& key, const Json& value) {
  json[key] = value;
  return Parse(json);
}

// Runs `fn` and returns what it logged.
template <typename Fn>
std::string LogOf(Fn fn) {
  testing::internal::CaptureStderr();
  fn();
  return testing::internal::GetCapturedStderr();
}

TEST(ModelConfig, UnknownModelsAreRefusedByName) {
  for (const char* name : {"MixtralForCausalLM", "Gemma2ForCausalLM", "Phi3ForCausalLM",
                           "LlamaForSequenceClassification"}) {
    ExpectFault(ParseWith(Tiny("llama"), "architectures", Json::array({name})).status(), kInvalid,
                {"DIR", name, "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM",
                 "Qwen3ForCausalLM"});
  }
  Json json = Tiny("llama");
  json.erase("architectures");
  EXPECT_TRUE(Parse(json).ok()) << "model_type alone is enough";
  ExpectFault(ParseWith(json, "model_type", "qwen3_moe").status(), kInvalid, {"qwen3_moe"});
  json.erase("model_type");
  ExpectFault(Parse(json).status(), kInvalid, {"architectures", "model_type"});
  ExpectFault(ParseWith(Tiny("llama"), "model_type", "qwen2").status(), kInvalid,
              {"LlamaForCausalLM", "qwen2"});
  json = Tiny("llama");
  json.erase("model_type");
  EXPECT_EQ(Parse(json)->model_type, "llama");
}

TEST(ModelConfig, FeaturesTheDecoderLacksAreRefused) {
  ExpectFault(ParseWith(Tiny("llama"), "hidden_act", "gelu").status(), kInvalid,
              {"hidden_act", "gelu", "silu"});
  ExpectFault(ParseWith(Tiny("llama"), "quantization_config", {{"quant_method", "gptq"}}).status(),
              kInvalid, {"quantization_config", "gptq"});
  EXPECT_TRUE(ParseWith(Tiny("llama"), "quantization_config", nullptr).ok());
  ExpectFault(ParseWith(Tiny("llama"), "final_logit_softcapping", 30.0).status(), kInvalid,
              {"final_logit_softcapping"});
  ExpectFault(ParseWith(Tiny("llama"), "attention_chunk_size", 8192).status(), kInvalid,
              {"attention_chunk_size"});
  EXPECT_TRUE(ParseWith(Tiny("llama"), "pretraining_tp", 2).ok()) << "ignored";
}

TEST(ModelConfig, HeadDimAndHeads) {
  EXPECT_EQ(Parse(Tiny("qwen3"))->head_dim, 32) << "the config's value wins over hidden / heads";
  EXPECT_EQ(ParseWith(Tiny("qwen3"), "head_dim", nullptr)->head_dim, 16);
  Json json = Tiny("qwen3");
  json.erase("head_dim");
  EXPECT_EQ(Parse(json)->head_dim, 16);
  json["hidden_size"] = 66;
  ExpectFault(Parse(json).status(), kInvalid, {"head_dim", "66", "4"});
  ExpectFault(ParseWith(Tiny("qwen3"), "num_key_value_heads", 3).status(), kInvalid, {"4", "3"});
  json = Tiny("llama");
  json.erase("num_key_value_heads");
  EXPECT_EQ(Parse(json)->num_kv_heads, 4);
  json = Tiny("mistral");
  json["num_key_value_heads"] = nullptr;
  EXPECT_EQ(Parse(json)->num_kv_heads, 4);
  json.erase("num_key_value_heads");
  json["num_attention_heads"] = 16;
  EXPECT_EQ(Parse(json)->num_kv_heads, 8) << "the default of Mistral's config class";
}

TEST(ModelConfig, Biases) {
  const ModelConfig plain = *Parse(Tiny("llama"));
  EXPECT_FALSE(plain.qkv_bias || plain.o_bias || plain.mlp_bias || plain.qk_norm);
  const ModelConfig biased = *ParseWith(Tiny("llama"), "attention_bias", true);
  EXPECT_TRUE(biased.qkv_bias && biased.o_bias && !biased.mlp_bias);
  EXPECT_TRUE(ParseWith(Tiny("llama"), "mlp_bias", true)->mlp_bias);
  const ModelConfig qwen2 = *Parse(Tiny("qwen2"));
  EXPECT_TRUE(qwen2.qkv_bias && !qwen2.o_bias && !qwen2.qk_norm);
  const ModelConfig qwen3 = *Parse(Tiny("qwen3"));
  EXPECT_TRUE(!qwen3.qkv_bias && !qwen3.o_bias && qwen3.qk_norm);
  EXPECT_TRUE(ParseWith(Tiny("qwen3"), "attention_bias", true)->o_bias);
  for (const char* type : {"llama", "mistral", "qwen2", "qwen3"}) {
    EXPECT_FALSE(Parse(Tiny(type))->tie_word_embeddings) << type;
    EXPECT_TRUE(ParseWith(Tiny(type), "tie_word_embeddings", true)->tie_word_embeddings) << type;
  }
}

TEST(ModelConfig, MistralWindow) {
  using Windows = std::vector<int64_t>;
  EXPECT_EQ(Parse(Tiny("mistral"))->layer_windows, (Windows{4096, 4096})) << "the class default";
  EXPECT_EQ(ParseWith(Tiny("mistral"), "sliding_window", 16)->layer_windows, (Windows{16, 16}));
  EXPECT_EQ(ParseWith(Tiny("mistral"), "sliding_window", nullptr)->layer_windows, (Windows{0, 0}));
  EXPECT_EQ(ParseWith(Tiny("mistral"), "sliding_window", 1000)->layer_windows,
            (Windows{1000, 1000}))
      << "wider than the model's positions: no harm";
  ExpectFault(ParseWith(Tiny("mistral"), "sliding_window", 0).status(), kInvalid,
              {"sliding_window", "0"});
  const std::string log = LogOf([] {
    EXPECT_EQ(ParseWith(Tiny("llama"), "sliding_window", 16)->layer_windows, (Windows{0, 0}));
  });
  EXPECT_NE(log.find("sliding_window 16 is ignored"), std::string::npos) << log;
}

TEST(ModelConfig, QwenWindows) {
  using Windows = std::vector<int64_t>;
  for (const char* type : {"qwen2", "qwen3"}) {
    Json json = Tiny(type);
    json["sliding_window"] = 16;
    EXPECT_EQ(Parse(json)->layer_windows, (Windows{0, 0})) << "use_sliding_window is false";
    json["use_sliding_window"] = true;
    EXPECT_EQ(Parse(json)->layer_windows, (Windows{0, 0})) << "below max_window_layers 28";
    json["max_window_layers"] = 1;
    EXPECT_EQ(Parse(json)->layer_windows, (Windows{0, 16}));
    json["layer_types"] = {"sliding_attention", "full_attention"};
    EXPECT_EQ(Parse(json)->layer_windows, (Windows{16, 0}));
    json["layer_types"] = {"full_attention"};
    ExpectFault(Parse(json).status(), kInvalid, {"layer_types", "1", "2"});
    json["layer_types"] = {"full_attention", "chunked_attention"};
    ExpectFault(Parse(json).status(), kInvalid, {"layer_types[1]", "chunked_attention"});
    json["layer_types"] = {"full_attention", "sliding_attention"};
    json["use_sliding_window"] = false;
    ExpectFault(Parse(json).status(), kInvalid, {"layer_types[1]", "use_sliding_window"});
  }
}

TEST(ModelConfig, RopeThetaInFourSpellings) {
  Json top = Tiny("llama"), inside = Tiny("llama"), both = Tiny("llama"), split = Tiny("llama");
  top["rope_theta"] = 1000000;
  inside["rope_parameters"] = {{"rope_type", "default"}, {"rope_theta", 1000000.0}};
  both["rope_parameters"] = {{"rope_theta", 1000000}};
  both["rope_theta"] = 1e6;
  split["rope_parameters"] = {{"rope_type", "default"}};
  split["rope_theta"] = 1000000;
  const std::string log = LogOf([&] {
    for (const Json& json : {top, inside, both, split}) {
      EXPECT_EQ(Parse(json)->rope.theta, 1e6);
      EXPECT_EQ(Parse(json)->rope.type, RopeType::kPlain);
    }
  });
  EXPECT_EQ(log, "");
  EXPECT_EQ(Parse(Tiny("llama"))->rope.theta, 10000.0);
}

TEST(ModelConfig, RopeParametersWinsWithAWarning) {
  Json json = Tiny("llama");
  json["rope_parameters"] = {{"rope_theta", 500000}, {"partial_rotary_factor", 0.5}};
  json["rope_theta"] = 1000000;
  json["partial_rotary_factor"] = 0.25;
  const std::string log = LogOf([&] {
    EXPECT_EQ(Parse(json)->rope.theta, 500000.0);
    EXPECT_EQ(Parse(json)->rope.partial_rotary_factor, 0.5);
  });
  EXPECT_NE(log.find("500000"), std::string::npos) << log;
  EXPECT_NE(log.find("1000000"), std::string::npos) << log;
  EXPECT_NE(log.find("partial_rotary_factor is 0.5"), std::string::npos) << log;
  const std::string both = LogOf([] {
    Json json = Tiny("llama");
    json["rope_parameters"] = {{"rope_type", "default"}};
    json["rope_scaling"] = {{"type", "linear"}, {"factor", 4}};
    EXPECT_EQ(Parse(json)->rope.type, RopeType::kPlain);
  });
  EXPECT_NE(both.find("linear"), std::string::npos) << both;
}

TEST(ModelConfig, PartialRotaryFactor) {
  EXPECT_EQ(ParseWith(Tiny("llama"), "partial_rotary_factor", 0.5)->rope.partial_rotary_factor,
            0.5);
  EXPECT_EQ(ParseWith(Tiny("llama"), "rope_parameters", {{"partial_rotary_factor", 0.5}})
                ->rope.partial_rotary_factor,
            0.5);
  // 32 * 0.1 = 3.2: three dims do not pair up.
  ExpectFault(ParseWith(Tiny("llama"), "partial_rotary_factor", 0.1).status(), kInvalid,
              {"partial_rotary_factor", "3"});
  ExpectFault(ParseWith(Tiny("llama"), "partial_rotary_factor", 1.5).status(), kInvalid,
              {"partial_rotary_factor", "1.5"});
  ExpectFault(ParseWith(Tiny("llama"), "head_dim", 15).status(), kInvalid, {"head_dim 15", "even"});
}

TEST(ModelConfig, RopeTypesUnderBothKeys) {
  for (const char* key : {"rope_type", "type"}) {
    for (const char* object : {"rope_scaling", "rope_parameters"}) {
      const auto parse = [&](const std::string& type, Json settings) {
        settings[key] = type;
        return ParseWith(Tiny("llama"), object, settings);
      };
      EXPECT_EQ(parse("default", Json::object())->rope.type, RopeType::kPlain);
      const RopeConfig linear = parse("linear", {{"factor", 4}})->rope;
      EXPECT_EQ(linear.type, RopeType::kLinear);
      EXPECT_EQ(linear.factor, 4.0);
      const RopeConfig dynamic = parse("dynamic", {{"factor", 2.0}})->rope;
      EXPECT_EQ(dynamic.type, RopeType::kDynamic);
      EXPECT_EQ(dynamic.original_max_position_embeddings, 128) << "max_position_embeddings";
      const RopeConfig llama3 = parse("llama3", {{"factor", 32},
                                                 {"low_freq_factor", 2},
                                                 {"high_freq_factor", 3},
                                                 {"original_max_position_embeddings", 64}})
                                    ->rope;
      EXPECT_EQ(llama3.type, RopeType::kLlama3);
      EXPECT_EQ(llama3.low_freq_factor, 2.0);
      EXPECT_EQ(llama3.high_freq_factor, 3.0);
      EXPECT_EQ(llama3.original_max_position_embeddings, 64);
      ExpectFault(parse("longrope", {{"factor", 4}}).status(), kInvalid,
                  {object, "longrope", "yarn"});
      ExpectFault(parse("linear", Json::object()).status(), kInvalid, {object, "factor"});
      ExpectFault(parse("linear", {{"factor", 0.5}}).status(), kInvalid, {"factor", "0.5"});
      ExpectFault(parse("llama3", {{"factor", 8}, {"high_freq_factor", 4}}).status(), kInvalid,
                  {"low_freq_factor"});
      ExpectFault(parse("llama3", {{"factor", 8}, {"high_freq_factor", 1}, {"low_freq_factor", 4}})
                      .status(),
                  kInvalid, {"low_freq_factor", "high_freq_factor"});
    }
  }
}

TEST(ModelConfig, Yarn) {
  const RopeConfig plain =
      ParseWith(Tiny("llama"), "rope_scaling", {{"type", "yarn"}, {"factor", 4}})->rope;
  EXPECT_EQ(plain.type, RopeType::kYarn);
  EXPECT_EQ(plain.original_max_position_embeddings, 128);
  EXPECT_EQ(plain.beta_fast, 32.0);
  EXPECT_EQ(plain.beta_slow, 1.0);
  EXPECT_TRUE(plain.truncate);
  EXPECT_FALSE(plain.attention_factor || plain.mscale || plain.mscale_all_dim);
  const RopeConfig full = ParseWith(Tiny("llama"), "rope_scaling",
                                    {{"rope_type", "yarn"},
                                     {"factor", 40},
                                     {"original_max_position_embeddings", 64},
                                     {"beta_fast", 16},
                                     {"beta_slow", 2},
                                     {"truncate", false},
                                     {"attention_factor", 1.5},
                                     {"mscale", 0.7},
                                     {"mscale_all_dim", 0.9}})
                              ->rope;
  EXPECT_EQ(full.original_max_position_embeddings, 64);
  EXPECT_EQ(full.beta_fast, 16.0);
  EXPECT_EQ(full.beta_slow, 2.0);
  EXPECT_FALSE(full.truncate);
  EXPECT_EQ(full.attention_factor, 1.5);
  EXPECT_EQ(full.mscale, 0.7);
  EXPECT_EQ(full.mscale_all_dim, 0.9);
}

TEST(ModelConfig, RopeOfEachLayerTypeIsRefused) {
  const Json nested = {{"full_attention", {{"rope_theta", 1e6}}},
                       {"sliding_attention", {{"rope_theta", 1e4}}}};
  ExpectFault(ParseWith(Tiny("qwen3"), "rope_parameters", nested).status(), kInvalid,
              {"rope_parameters", "full_attention", "layer type"});
}

TEST(ModelConfig, DTypeUnderBothKeys) {
  for (const char* key : {"dtype", "torch_dtype"}) {
    EXPECT_EQ(ParseWith(Tiny("llama"), key, "float32")->dtype, DType::kF32);
    EXPECT_EQ(ParseWith(Tiny("llama"), key, "float16")->dtype, DType::kF16);
    EXPECT_EQ(ParseWith(Tiny("llama"), key, "bfloat16")->dtype, DType::kBF16);
    ExpectFault(ParseWith(Tiny("llama"), key, "float8_e4m3fn").status(), kInvalid,
                {key, "float8_e4m3fn"});
  }
}

TEST(ModelConfig, SpecialIds) {
  using Ids = std::vector<int32_t>;
  EXPECT_EQ(ParseWith(Tiny("llama"), "eos_token_id", 5)->eos_token_ids, (Ids{5}));
  EXPECT_EQ(ParseWith(Tiny("llama"), "eos_token_id", {5, 9})->eos_token_ids, (Ids{5, 9}));
  EXPECT_TRUE(ParseWith(Tiny("llama"), "eos_token_id", nullptr)->eos_token_ids.empty());
  EXPECT_EQ(Parse(Tiny("llama"))->eos_token_ids, (Ids{2})) << "the class default";
  EXPECT_EQ(Parse(Tiny("mistral"))->bos_token_id, 1);
  EXPECT_TRUE(Parse(Tiny("qwen3"))->eos_token_ids.empty());
  EXPECT_FALSE(Parse(Tiny("qwen3"))->bos_token_id.has_value());
  ExpectFault(ParseWith(Tiny("llama"), "eos_token_id", "</s>").status(), kInvalid,
              {"eos_token_id"});
  const std::string log = LogOf([] {
    EXPECT_EQ(ParseWith(Tiny("llama"), "eos_token_id", {7, 40})->eos_token_ids, (Ids{7}));
  });
  EXPECT_NE(log.find("eos_token_id 40"), std::string::npos) << log;
}

TEST(ModelConfig, SizesAreBoundedAndTyped) {
  for (const char* key :
       {"hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings"}) {
    for (const Json& bad : {Json(0), Json(-4), Json(int64_t{1} << 60), Json(1e300), Json(2.5),
                            Json("64"), Json(true), Json::array({64})}) {
      ExpectFault(ParseWith(Tiny("qwen3"), key, bad).status(), kInvalid, {"DIR", key});
    }
  }
  for (const char* key : {"hidden_size", "intermediate_size", "num_hidden_layers",
                          "num_attention_heads", "vocab_size"}) {
    Json json = Tiny("qwen3");
    json.erase(key);
    ExpectFault(Parse(json).status(), kInvalid, {key, "missing"});
  }
  EXPECT_EQ(ParseWith(Tiny("qwen3"), "hidden_size", 64.0)->hidden_size, 64);
  Json json = Tiny("qwen3");
  json["num_attention_heads"] = 65536;
  json["head_dim"] = 65536;
  ExpectFault(Parse(json).status(), kInvalid, {"65536"});
  for (const char* key : {"rms_norm_eps", "rope_theta"}) {
    ExpectFault(ParseWith(Tiny("qwen3"), key, "small").status(), kInvalid, {key, "number"});
    ExpectFault(ParseWith(Tiny("qwen3"), key, -1.0).status(), kInvalid, {key, "-1"});
  }
  EXPECT_EQ(ParseWith(Tiny("qwen3"), "rms_norm_eps", 1e-5)->rms_norm_eps, 1e-5);
  ExpectFault(ParseWith(Tiny("qwen3"), "tie_word_embeddings", "no").status(), kInvalid,
              {"tie_word_embeddings"});
  ExpectFault(ParseWith(Tiny("qwen3"), "rope_scaling", "linear").status(), kInvalid,
              {"rope_scaling"});
  ExpectFault(ParseWith(Tiny("qwen3"), "architectures", "Qwen3ForCausalLM").status(), kInvalid,
              {"architectures"});
  ExpectFault(Parse(Json::array()).status(), kInvalid, {"object"});
}

TEST(GenerationConfig, ReadsWhatItSays) {
  const auto parse = [](const Json& json) { return ParseGenerationConfig(json, "FILE"); };
  const GenerationConfig full = *parse({{"temperature", 0.1},
                                        {"top_p", 0.9},
                                        {"top_k", 1},
                                        {"min_p", 0.05},
                                        {"repetition_penalty", 1.05},
                                        {"do_sample", true},
                                        {"eos_token_id", {5, 9}}});
  EXPECT_EQ(full.temperature, 0.1);
  EXPECT_EQ(full.top_p, 0.9);
  EXPECT_EQ(full.top_k, 1);
  EXPECT_EQ(full.min_p, 0.05);
  EXPECT_EQ(full.repetition_penalty, 1.05);
  EXPECT_EQ(full.do_sample, true);
  EXPECT_EQ(full.eos_token_ids, (std::vector<int32_t>{5, 9}));
  EXPECT_EQ(parse({{"eos_token_id", 7}})->eos_token_ids, (std::vector<int32_t>{7}));
  const GenerationConfig none = *parse({{"temperature", nullptr}});
  EXPECT_FALSE(none.temperature || none.top_p || none.top_k || none.min_p ||
               none.repetition_penalty || none.do_sample);
  EXPECT_TRUE(none.eos_token_ids.empty());
  for (const auto& [key, bad] : std::map<std::string, Json>{{"temperature", -0.5},
                                                            {"top_p", 1.5},
                                                            {"top_k", 2.5},
                                                            {"repetition_penalty", 0},
                                                            {"do_sample", 1},
                                                            {"eos_token_id", -3}}) {
    ExpectFault(parse({{key, bad}}).status(), kInvalid, {"FILE", key});
  }
}

}  // namespace
}  // namespace lockstep
