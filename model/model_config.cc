#include "model/model_config.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "model/json_fields.h"
#include "runtime/core/log.h"

namespace lockstep {

namespace {

// Bounds of sizes: well above any published model, low enough that sizes in bytes of weights and KV
// (products of a few of them) stay within int64_t.
constexpr int64_t kMaxHidden = int64_t{1} << 18;
constexpr int64_t kMaxIntermediate = int64_t{1} << 22;
constexpr int64_t kMaxLayers = 4096;
constexpr int64_t kMaxHeads = 65536;
constexpr int64_t kMaxHeadDim = 65536;
constexpr int64_t kMaxProjection = int64_t{1} << 20;  // heads * head_dim
constexpr int64_t kMaxVocab = int64_t{1} << 24;
constexpr int64_t kMaxPositions = int64_t{1} << 27;

// What a Hugging Face config class assumes where config.json does not say.
struct ModelFamily {
  const char* model_type;
  const char* architecture;
  int64_t max_position_embeddings;
  int64_t num_kv_heads;  // 0: as many as query heads
  bool has_special_ids;  // bos 1, eos 2
};
constexpr std::array<ModelFamily, 4> kFamilies = {{
    {"llama", "LlamaForCausalLM", 2048, 0, true},
    {"mistral", "MistralForCausalLM", 131072, 8, true},
    {"qwen2", "Qwen2ForCausalLM", 32768, 0, false},
    {"qwen3", "Qwen3ForCausalLM", 32768, 0, false},
}};
constexpr int64_t kDefaultWindow = 4096;     // mistral, qwen2, qwen3
constexpr int64_t kDefaultWindowStart = 28;  // qwen2, qwen3: max_window_layers
constexpr int32_t kDefaultBos = 1;
constexpr int32_t kDefaultEos = 2;

std::string SupportedArchitectures() {
  std::string list;
  for (const ModelFamily& family : kFamilies) {
    absl::StrAppend(&list, list.empty() ? "" : ", ", family.architecture);
  }
  return list;
}

const ModelFamily* FindFamily(JsonFields& fields) {
  const std::optional<std::string> model_type = fields.String("model_type");
  const std::vector<std::string> architectures = fields.Strings("architectures");
  if (!fields.status().ok()) return nullptr;
  if (!model_type && architectures.empty()) {
    fields.Fail("neither architectures nor model_type says which model this is");
    return nullptr;
  }
  const ModelFamily* by_architecture = nullptr;
  for (const std::string& name : architectures) {
    const auto it = std::find_if(kFamilies.begin(), kFamilies.end(),
                                 [&](const ModelFamily& f) { return name == f.architecture; });
    if (it == kFamilies.end()) {
      fields.Fail(absl::StrFormat("architecture %s is not supported; supported are %s", name,
                                  SupportedArchitectures()));
      return nullptr;
    }
    by_architecture = &*it;
  }
  if (!model_type) return by_architecture;
  const auto it = std::find_if(kFamilies.begin(), kFamilies.end(),
                               [&](const ModelFamily& f) { return *model_type == f.model_type; });
  if (it == kFamilies.end()) {
    fields.Fail(absl::StrFormat("model_type %s is not supported; supported are %s", *model_type,
                                SupportedArchitectures()));
    return nullptr;
  }
  if (by_architecture != nullptr && by_architecture != &*it) {
    fields.Fail(absl::StrFormat("architectures says %s, model_type says %s: which is it?",
                                by_architecture->architecture, *model_type));
    return nullptr;
  }
  return &*it;
}

// Features that change the result and that the decoder does not have.
void RefuseUnsupportedFeatures(JsonFields& fields) {
  for (const char* key : {"quantization_config", "compression_config"}) {
    const Json* quantization = fields.Object(key);
    if (quantization == nullptr) continue;
    JsonFields inner(*quantization, fields.where());
    const std::string method = inner.String("quant_method").value_or("unnamed");
    fields.Fail(absl::StrFormat(
        "%s: weights quantised by method %s are not supported; use an unquantised checkpoint "
        "(F32, F16, BF16) or a GGUF file",
        key, method));
  }
  const std::string activation = fields.String("hidden_act").value_or("silu");
  if (activation != "silu" && activation != "swish") {  // two names of one function
    fields.Fail(absl::StrFormat("hidden_act %s is not supported; supported is silu", activation));
  }
  for (const char* key : {"attn_logit_softcapping", "final_logit_softcapping", "logit_scale",
                          "attention_multiplier", "embedding_multiplier", "residual_multiplier",
                          "attention_chunk_size", "num_local_experts", "num_experts"}) {
    if (fields.Has(key)) {
      fields.Fail(absl::StrFormat("%s is set: this model feature is not supported", key));
    }
  }
}

void ParseSizes(JsonFields& fields, const ModelFamily& family, ModelConfig& config) {
  config.hidden_size = fields.RequiredInt("hidden_size", 1, kMaxHidden);
  config.intermediate_size = fields.RequiredInt("intermediate_size", 1, kMaxIntermediate);
  config.num_layers = fields.RequiredInt("num_hidden_layers", 1, kMaxLayers);
  config.num_query_heads = fields.RequiredInt("num_attention_heads", 1, kMaxHeads);
  config.vocab_size = fields.RequiredInt("vocab_size", 1, kMaxVocab);
  config.max_position_embeddings = fields.Int("max_position_embeddings", 1, kMaxPositions)
                                       .value_or(family.max_position_embeddings);
  // The class default stands for an absent key only; null means one KV head a query head.
  const int64_t default_kv_heads = family.num_kv_heads == 0 || fields.HasNull("num_key_value_heads")
                                       ? config.num_query_heads
                                       : family.num_kv_heads;
  config.num_kv_heads = fields.Int("num_key_value_heads", 1, kMaxHeads).value_or(default_kv_heads);
  if (!fields.status().ok()) return;
  if (config.num_query_heads % config.num_kv_heads != 0) {
    fields.Fail(
        absl::StrFormat("num_attention_heads %d is not a multiple of num_key_value_heads %d",
                        config.num_query_heads, config.num_kv_heads));
  }
  const std::optional<int64_t> head_dim = fields.Int("head_dim", 1, kMaxHeadDim);
  if (!head_dim && config.hidden_size % config.num_query_heads != 0) {
    fields.Fail(absl::StrFormat(
        "head_dim is absent and hidden_size %d is not a multiple of num_attention_heads %d",
        config.hidden_size, config.num_query_heads));
  }
  config.head_dim = head_dim.value_or(config.hidden_size / config.num_query_heads);
  if (config.num_query_heads * config.head_dim > kMaxProjection) {
    fields.Fail(absl::StrFormat("num_attention_heads %d times head_dim %d is more than %d",
                                config.num_query_heads, config.head_dim, kMaxProjection));
  }
  config.rms_norm_eps = fields.Double("rms_norm_eps", 0.0, 1.0).value_or(1e-6);
}

void ParseBiases(JsonFields& fields, ModelConfig& config) {
  if (config.model_type == "llama") {
    config.qkv_bias = config.o_bias = fields.Bool("attention_bias").value_or(false);
    config.mlp_bias = fields.Bool("mlp_bias").value_or(false);
  } else if (config.model_type == "qwen2") {
    config.qkv_bias = true;  // fixed by the class; its output projection has none
  } else if (config.model_type == "qwen3") {
    config.qkv_bias = config.o_bias = fields.Bool("attention_bias").value_or(false);
    config.qk_norm = true;
  }
  config.tie_word_embeddings = fields.Bool("tie_word_embeddings").value_or(false);
}

// The window in force, 0 for none.
int64_t ParseWindow(JsonFields& fields, const ModelConfig& config) {
  std::optional<int64_t> window =
      fields.Int("sliding_window", 1, std::numeric_limits<int32_t>::max());
  if (!window && !fields.HasNull("sliding_window")) window = kDefaultWindow;
  if (config.model_type == "mistral") return window.value_or(0);
  if (config.model_type == "llama") {
    if (fields.Has("sliding_window") && *window < config.max_position_embeddings) {
      LogWarning(
          absl::StrFormat("%s: sliding_window %d is ignored: llama models attend to all positions",
                          fields.where(), *window));
    }
    return 0;
  }
  return fields.Bool("use_sliding_window").value_or(false) ? window.value_or(0) : 0;
}

void ParseLayerWindows(JsonFields& fields, ModelConfig& config) {
  const int64_t window = ParseWindow(fields, config);
  const bool by_depth = config.model_type == "qwen2" || config.model_type == "qwen3";
  const int64_t first = fields.Int("max_window_layers", 0, std::numeric_limits<int32_t>::max())
                            .value_or(kDefaultWindowStart);
  const bool has_types = fields.Has("layer_types");
  const std::vector<std::string> types = fields.Strings("layer_types");
  if (!fields.status().ok()) return;
  if (has_types && static_cast<int64_t>(types.size()) != config.num_layers) {
    return fields.Fail(absl::StrFormat("layer_types has %d entries for num_hidden_layers %d",
                                       types.size(), config.num_layers));
  }
  config.layer_windows.assign(config.num_layers, 0);
  for (int64_t layer = 0; layer < config.num_layers; ++layer) {
    bool slides = window > 0 && (!by_depth || layer >= first);
    if (has_types) {
      slides = types[layer] == "sliding_attention";
      if (!slides && types[layer] != "full_attention") {
        return fields.Fail(absl::StrFormat(
            "layer_types[%d] is %s: supported are full_attention and sliding_attention", layer,
            types[layer]));
      }
      if (slides && window == 0) {
        return fields.Fail(absl::StrFormat(
            "layer_types[%d] is sliding_attention, but no sliding window is in force (see "
            "sliding_window and use_sliding_window)",
            layer));
      }
    }
    config.layer_windows[layer] = slides ? window : 0;
  }
}

// A number that may stand in rope_parameters (which wins) and at the top level.
double RopeNumber(JsonFields& fields, JsonFields& rope, const char* key, double min, double max,
                  double fallback) {
  const std::optional<double> outer = fields.Double(key, min, max);
  const std::optional<double> inner = rope.Double(key, min, max);
  if (outer && inner && *outer != *inner) {
    LogWarning(absl::StrFormat(
        "%s: %s is %.10g in rope_parameters and %.10g at the top level; rope_parameters wins",
        fields.where(), key, *inner, *outer));
  }
  return inner ? *inner : outer.value_or(fallback);
}

absl::StatusOr<RopeType> RopeTypeFromName(const std::string& name, const std::string& where) {
  if (name == "default") return RopeType::kPlain;
  if (name == "linear") return RopeType::kLinear;
  if (name == "dynamic") return RopeType::kDynamic;
  if (name == "llama3") return RopeType::kLlama3;
  if (name == "yarn") return RopeType::kYarn;
  return absl::InvalidArgumentError(absl::StrFormat(
      "%s: rope type %s is not supported; supported are default, linear, dynamic, llama3, yarn",
      where, name));
}

// The settings of one rope type; rope.type is set.
void ParseRopeType(JsonFields& fields, JsonFields& in, ModelConfig& config) {
  RopeConfig& rope = config.rope;
  rope.factor = in.RequiredDouble("factor", 1.0, 1e6);
  if (rope.type == RopeType::kLinear) return;
  const std::optional<int64_t> outer_original =
      fields.Int("original_max_position_embeddings", 1, kMaxPositions);
  rope.original_max_position_embeddings =
      in.Int("original_max_position_embeddings", 1, kMaxPositions)
          .value_or(outer_original.value_or(config.max_position_embeddings));
  if (rope.type == RopeType::kLlama3) {
    rope.low_freq_factor = in.RequiredDouble("low_freq_factor", 1e-6);
    rope.high_freq_factor = in.RequiredDouble("high_freq_factor", 1e-6);
    if (in.status().ok() && rope.high_freq_factor <= rope.low_freq_factor) {
      in.Fail(absl::StrFormat("high_freq_factor %g must be above low_freq_factor %g",
                              rope.high_freq_factor, rope.low_freq_factor));
    }
  } else if (rope.type == RopeType::kYarn) {
    rope.beta_fast = in.Double("beta_fast", 1e-6).value_or(rope.beta_fast);
    rope.beta_slow = in.Double("beta_slow", 1e-6).value_or(rope.beta_slow);
    if (in.status().ok() && rope.beta_fast < rope.beta_slow) {
      in.Fail(absl::StrFormat("beta_fast %g must be at least beta_slow %g", rope.beta_fast,
                              rope.beta_slow));
    }
    rope.truncate = in.Bool("truncate").value_or(true);
    rope.attention_factor = in.Double("attention_factor", 1e-6);
    rope.mscale = in.Double("mscale", 0.0);
    rope.mscale_all_dim = in.Double("mscale_all_dim", 0.0);
  }
}

// rope_parameters is the new spelling of rope_scaling, with rope_theta inside.
void ParseRope(JsonFields& fields, ModelConfig& config) {
  static const Json kNone = Json::object();
  const Json* parameters = fields.Object("rope_parameters");
  const Json* scaling = fields.Object("rope_scaling");
  if (parameters != nullptr && scaling != nullptr && *parameters != *scaling) {
    LogWarning(
        absl::StrFormat("%s: rope_parameters %s and rope_scaling %s differ; rope_parameters wins",
                        fields.where(), DumpJson(*parameters), DumpJson(*scaling)));
  }
  const char* key =
      parameters != nullptr || scaling == nullptr ? "rope_parameters" : "rope_scaling";
  const Json* chosen = parameters != nullptr ? parameters : scaling;
  if (chosen == nullptr) chosen = &kNone;
  for (const auto& [name, value] : chosen->items()) {
    if (value.is_object()) {
      return fields.Fail(absl::StrFormat(
          "%s has settings of its own for layer type %s: not supported, one RoPE serves all layers",
          key, name));
    }
  }
  JsonFields in(*chosen, fields.where() + ": " + key);
  const std::optional<std::string> legacy = in.String("type");
  const std::string name = in.String("rope_type").value_or(legacy.value_or("default"));
  if (legacy && *legacy != name) {
    LogWarning(absl::StrFormat("%s: rope_type %s and type %s differ; rope_type wins", in.where(),
                               name, *legacy));
  }
  const absl::StatusOr<RopeType> type = RopeTypeFromName(name, in.where());
  fields.Adopt(in.status());
  fields.Adopt(type.status());
  if (!fields.status().ok()) return;
  config.rope.type = *type;
  config.rope.theta = RopeNumber(fields, in, "rope_theta", 1e-3, std::numeric_limits<double>::max(),
                                 config.rope.theta);
  config.rope.partial_rotary_factor =
      RopeNumber(fields, in, "partial_rotary_factor", 0.0, 1.0, 1.0);
  if (*type != RopeType::kPlain) ParseRopeType(fields, in, config);
  const auto rotary_dims =
      static_cast<int64_t>(config.head_dim * config.rope.partial_rotary_factor);
  if (rotary_dims < 2 || rotary_dims % 2 != 0) {
    in.Fail(absl::StrFormat(
        "head_dim %d times partial_rotary_factor %g gives %d rotated dims: must be even and "
        "at least 2",
        config.head_dim, config.rope.partial_rotary_factor, rotary_dims));
  }
  fields.Adopt(in.status());
}

void ParseDType(JsonFields& fields, ModelConfig& config) {
  const std::optional<std::string> legacy = fields.String("torch_dtype");
  const std::optional<std::string> current = fields.String("dtype");
  if (legacy && current && *legacy != *current) {
    LogWarning(absl::StrFormat("%s: dtype %s and torch_dtype %s differ; dtype wins", fields.where(),
                               *current, *legacy));
  }
  const std::string name = current.value_or(legacy.value_or("bfloat16"));
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    if (Name(dtype) == name) {
      config.dtype = dtype;
      return;
    }
  }
  fields.Fail(absl::StrFormat("%s %s is not supported; supported are float32, float16, bfloat16",
                              current ? "dtype" : "torch_dtype", name));
}

void ParseSpecialIds(JsonFields& fields, const ModelFamily& family, ModelConfig& config) {
  const auto in_vocab = [&](int32_t id, const char* key) {
    if (id < config.vocab_size) return true;
    LogWarning(absl::StrFormat("%s: %s %d is ignored: vocab_size is %d", fields.where(), key, id,
                               config.vocab_size));
    return false;
  };
  for (const int32_t id : fields.TokenIds("eos_token_id")) {
    if (in_vocab(id, "eos_token_id")) config.eos_token_ids.push_back(id);
  }
  const std::vector<int32_t> bos = fields.TokenIds("bos_token_id");
  if (!bos.empty() && in_vocab(bos[0], "bos_token_id")) config.bos_token_id = bos[0];
  if (!family.has_special_ids) return;
  if (!fields.Has("eos_token_id") && !fields.HasNull("eos_token_id") &&
      kDefaultEos < config.vocab_size) {
    config.eos_token_ids = {kDefaultEos};
  }
  if (!fields.Has("bos_token_id") && !fields.HasNull("bos_token_id") &&
      kDefaultBos < config.vocab_size) {
    config.bos_token_id = kDefaultBos;
  }
}

}  // namespace

absl::StatusOr<ModelConfig> ParseModelConfig(const Json& json, const std::string& where) {
  JsonFields fields(json, where);
  const ModelFamily* family = FindFamily(fields);
  if (family == nullptr) return fields.status();
  RefuseUnsupportedFeatures(fields);
  ModelConfig config;
  config.model_type = family->model_type;
  ParseSizes(fields, *family, config);
  if (!fields.status().ok()) return fields.status();
  ParseBiases(fields, config);
  ParseLayerWindows(fields, config);
  ParseRope(fields, config);
  ParseDType(fields, config);
  ParseSpecialIds(fields, *family, config);
  if (!fields.status().ok()) return fields.status();
  return config;
}

absl::StatusOr<GenerationConfig> ParseGenerationConfig(const Json& json, const std::string& where) {
  JsonFields fields(json, where);
  GenerationConfig config;
  config.temperature = fields.Double("temperature", 0.0, 1e6);
  config.top_p = fields.Double("top_p", 1e-9, 1.0);
  config.top_k = fields.Int("top_k", -1, std::numeric_limits<int32_t>::max());
  if (config.top_k && *config.top_k < 0) config.top_k = 0;  // -1, another spelling of "all tokens"
  config.min_p = fields.Double("min_p", 0.0, 1.0);
  config.repetition_penalty = fields.Double("repetition_penalty", 1e-6, 1e6);
  config.do_sample = fields.Bool("do_sample");
  config.eos_token_ids = fields.TokenIds("eos_token_id");
  if (!fields.status().ok()) return fields.status();
  return config;
}

}  // namespace lockstep
