#include "model/checkpoint/tensor_names.h"

namespace lockstep {

std::vector<TensorSpec> RequiredTensors(const ModelConfig& c) {
  const int64_t hidden = c.hidden_size;
  const int64_t ffn = c.intermediate_size;
  const int64_t q_rows = c.num_query_heads * c.head_dim;
  const int64_t kv_rows = c.num_kv_heads * c.head_dim;
  std::vector<TensorSpec> specs = {{kEmbedTokens, {c.vocab_size, hidden}}};
  for (int64_t layer = 0; layer < c.num_layers; ++layer) {
    const auto add = [&](const char* suffix, std::vector<int64_t> shape) {
      specs.push_back({LayerTensor(layer, suffix), std::move(shape)});
    };
    add(kInputNorm, {hidden});
    add(kQWeight, {q_rows, hidden});
    add(kKWeight, {kv_rows, hidden});
    add(kVWeight, {kv_rows, hidden});
    if (c.qkv_bias) {
      add(kQBias, {q_rows});
      add(kKBias, {kv_rows});
      add(kVBias, {kv_rows});
    }
    if (c.qk_norm) {
      add(kQNorm, {c.head_dim});
      add(kKNorm, {c.head_dim});
    }
    add(kOWeight, {hidden, q_rows});
    if (c.o_bias) add(kOBias, {hidden});
    add(kPostAttentionNorm, {hidden});
    add(kGateWeight, {ffn, hidden});
    add(kUpWeight, {ffn, hidden});
    add(kDownWeight, {hidden, ffn});
    if (c.mlp_bias) {
      add(kGateBias, {ffn});
      add(kUpBias, {ffn});
      add(kDownBias, {hidden});
    }
  }
  specs.push_back({kFinalNorm, {hidden}});
  if (!c.tie_word_embeddings) specs.push_back({kLmHead, {c.vocab_size, hidden}});
  return specs;
}

}  // namespace lockstep
