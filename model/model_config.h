// A decoder-only transformer, described once: llama, mistral, qwen2 and qwen3 are values of this
// struct, not code paths.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "parallel/partition.h"
#include "runtime/core/dtype.h"
#include "runtime/core/json.h"

namespace lockstep {

enum class RopeType { kPlain, kLinear, kDynamic, kLlama3, kYarn };

// Rotary position embedding. Field names follow Hugging Face's rope_parameters.
struct RopeConfig {
  RopeType type = RopeType::kPlain;
  double theta = 10000.0;
  double partial_rotary_factor = 1.0;  // the first factor * D dims of a head rotate
  double factor = 1.0;
  double low_freq_factor = 1.0;                  // llama3
  double high_freq_factor = 4.0;                 // llama3
  int64_t original_max_position_embeddings = 0;  // llama3, yarn, dynamic: the trained length
  double beta_fast = 32.0;                       // yarn
  double beta_slow = 1.0;                        // yarn
  bool truncate = true;  // yarn: round the borders of the ramp to whole dims
  std::optional<double>
      attention_factor;  // yarn: factor on cos and sin; derived from the next two where absent
  std::optional<double> mscale;
  std::optional<double> mscale_all_dim;
  // GGUF's rope_freqs.weight: inv_freq[i] is divided by freq_factors[i]. Empty: no such factors.
  // One for each rotated pair; llama3's scaling arrives like this, with type kPlain.
  std::vector<float> freq_factors;
};

struct ModelConfig {
  std::string model_type;         // "llama", "mistral", "qwen2", "qwen3"
  int64_t hidden_size = 0;        // E
  int64_t intermediate_size = 0;  // F
  int64_t num_layers = 0;         // L
  int64_t num_query_heads = 0;    // Hq
  int64_t num_kv_heads = 0;       // Hkv
  int64_t head_dim = 0;           // D
  int64_t vocab_size = 0;         // V
  int64_t max_position_embeddings = 0;
  double rms_norm_eps = 1e-6;
  bool qkv_bias = false;
  bool o_bias = false;
  bool mlp_bias = false;
  bool qk_norm = false;  // RMSNorm of length D on each query and key head before RoPE
  bool tie_word_embeddings = false;
  std::vector<int64_t> layer_windows;  // [L] sliding window of each layer, 0: full attention
  RopeConfig rope;
  DType dtype =
      DType::kBF16;  // what the checkpoint says its weights are: the meaning of --dtype auto
  std::vector<int32_t> eos_token_ids;
  std::optional<int32_t> bos_token_id;

  PartitionDims Dims() const {
    return {num_query_heads, num_kv_heads, intermediate_size, vocab_size};
  }
};

// config.json's content, old and new spellings. `where` (the path) leads every message.
// InvalidArgument for an unknown architecture, rope type, activation, or a contradiction; what is
// legal but suspicious (two rope thetas) is logged as a warning.
absl::StatusOr<ModelConfig> ParseModelConfig(const Json& config, const std::string& where);

// Defaults a checkpoint ships in generation_config.json; absent means the file does not say.
struct GenerationConfig {
  std::optional<double> temperature;
  std::optional<double> top_p;
  std::optional<int64_t> top_k;
  std::optional<double> min_p;
  std::optional<double> repetition_penalty;
  std::optional<bool> do_sample;
  std::vector<int32_t> eos_token_ids;
};
absl::StatusOr<GenerationConfig> ParseGenerationConfig(const Json& config,
                                                       const std::string& where);

}  // namespace lockstep
