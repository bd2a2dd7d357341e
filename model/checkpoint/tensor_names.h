// Names of a decoder's weights, as Hugging Face writes them for llama-like models, and the shapes a
// config implies. The checkpoint readers, the shape check and the decoder all take them from here.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "model/model_config.h"

namespace lockstep {

inline constexpr char kEmbedTokens[] = "model.embed_tokens.weight";  // [V, E]
inline constexpr char kFinalNorm[] = "model.norm.weight";            // [E]
inline constexpr char kLmHead[] = "lm_head.weight";  // [V, E]; absent where embeddings are tied

// Suffixes for LayerTensor. Projections are stored [out, in].
inline constexpr char kInputNorm[] = "input_layernorm.weight";                   // [E]
inline constexpr char kPostAttentionNorm[] = "post_attention_layernorm.weight";  // [E]
inline constexpr char kQWeight[] = "self_attn.q_proj.weight";                    // [Hq * D, E]
inline constexpr char kKWeight[] = "self_attn.k_proj.weight";                    // [Hkv * D, E]
inline constexpr char kVWeight[] = "self_attn.v_proj.weight";                    // [Hkv * D, E]
inline constexpr char kOWeight[] = "self_attn.o_proj.weight";                    // [E, Hq * D]
inline constexpr char kQBias[] = "self_attn.q_proj.bias";      // qkv_bias: [Hq * D]
inline constexpr char kKBias[] = "self_attn.k_proj.bias";      // qkv_bias: [Hkv * D]
inline constexpr char kVBias[] = "self_attn.v_proj.bias";      // qkv_bias: [Hkv * D]
inline constexpr char kOBias[] = "self_attn.o_proj.bias";      // o_bias: [E]
inline constexpr char kQNorm[] = "self_attn.q_norm.weight";    // qk_norm: [D]
inline constexpr char kKNorm[] = "self_attn.k_norm.weight";    // qk_norm: [D]
inline constexpr char kGateWeight[] = "mlp.gate_proj.weight";  // [F, E]
inline constexpr char kUpWeight[] = "mlp.up_proj.weight";      // [F, E]
inline constexpr char kDownWeight[] = "mlp.down_proj.weight";  // [E, F]
inline constexpr char kGateBias[] = "mlp.gate_proj.bias";      // mlp_bias: [F]
inline constexpr char kUpBias[] = "mlp.up_proj.bias";          // mlp_bias: [F]
inline constexpr char kDownBias[] = "mlp.down_proj.bias";      // mlp_bias: [E]

// "model.layers.3.self_attn.q_proj.weight"
inline std::string LayerTensor(int64_t layer, const std::string& suffix) {
  return "model.layers." + std::to_string(layer) + "." + suffix;
}

struct TensorSpec {
  std::string name;
  std::vector<int64_t> shape;
};

// Every tensor the decoder reads, in the order of the forward pass.
std::vector<TensorSpec> RequiredTensors(const ModelConfig& config);

}  // namespace lockstep
