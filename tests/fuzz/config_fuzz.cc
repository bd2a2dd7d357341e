// Any bytes as config.json and generation_config.json, and what start-up computes from a config.
#include <string>
#include <vector>

#include "model/checkpoint/tensor_names.h"
#include "model/checkpoint/unique_json.h"
#include "model/model_config.h"
#include "model/rope.h"
#include "runtime/core/log.h"

namespace lockstep {
namespace {

void UseConfig(const ModelConfig& config) {
  LOCKSTEP_CHECK(static_cast<int64_t>(config.layer_windows.size()) == config.num_layers);
  if (config.num_layers <= 8) {
    for (const TensorSpec& spec : RequiredTensors(config)) {
      int64_t elements = 1;
      for (const int64_t size : spec.shape) {
        LOCKSTEP_CHECK(size > 0 && !__builtin_mul_overflow(elements, size, &elements));
      }
    }
  }
  for (const int ranks : {1, 3, 8}) {
    const auto parts = PartitionModel(config.Dims(), ranks);
    if (!parts.ok()) continue;
    LOCKSTEP_CHECK(static_cast<int>(parts->size()) == ranks);
    LOCKSTEP_CHECK(parts->back().query_heads.end == config.num_query_heads);
    LOCKSTEP_CHECK(parts->back().vocab.end == config.vocab_size);
  }
  const auto rope = RotaryEmbedding::Create(config.rope, config.head_dim);
  if (!rope.ok()) return;
  const std::vector<int32_t> positions = {0, 1, 1 << 20};
  const std::vector<int32_t> lengths = {1, 2, (1 << 20) + 1};
  std::vector<float> cos(3 * rope->rotary_dim() / 2), sin(cos.size());
  rope->FillCosSin(positions, lengths, 0, 3, cos.data(), sin.data());
}

}  // namespace
}  // namespace lockstep

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  lockstep::SilenceLog();
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto json = lockstep::ParseUniqueJson(
      std::string(reinterpret_cast<const char*>(data), size), "config.json");
  if (!json.ok()) return 0;
  const auto config = lockstep::ParseModelConfig(*json, "config.json");
  if (config.ok()) lockstep::UseConfig(*config);
  (void)lockstep::ParseGenerationConfig(*json, "generation_config.json");
  return 0;
}
