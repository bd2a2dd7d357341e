#include "model/checkpoint/validate.h"

#include <charconv>
#include <set>
#include <string_view>

#include "model/checkpoint/tensor_names.h"
#include "runtime/core/log.h"

namespace lockstep {

namespace {

std::string ShapeText(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (const int64_t size : shape) absl::StrAppend(&text, text.size() > 1 ? ", " : "", size);
  return text + "]";
}

// The layer of a tensor "model.layers.N.*"; -1 for other tensors.
int64_t LayerOf(std::string_view name) {
  constexpr std::string_view kPrefix = "model.layers.";
  if (!name.starts_with(kPrefix)) return -1;
  name.remove_prefix(kPrefix.size());
  int64_t layer = -1;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), layer);
  const bool whole = error == std::errc() && end != name.data() + name.size() && *end == '.';
  return whole ? layer : -1;
}

// Layers behind the last configured one are legal (some models keep a draft head there), but also
// what a config of another model looks like.
void WarnOfSpareLayers(const ModelConfig& config, const Checkpoint& checkpoint) {
  std::set<int64_t> layers;
  for (const std::string& name : checkpoint.Names()) {
    if (const int64_t layer = LayerOf(name); layer >= 0) layers.insert(layer);
  }
  if (layers.empty() || *layers.rbegin() < config.num_layers) return;
  LogWarning(absl::StrFormat(
      "%s: holds tensors of %d layers, num_hidden_layers is %d: the layers from %d on are not used",
      checkpoint.description(), layers.size(), config.num_layers, config.num_layers));
}

}  // namespace

absl::Status ValidateTensors(const ModelConfig& config, const Checkpoint& checkpoint) {
  std::set<std::string> needed;
  for (const TensorSpec& spec : RequiredTensors(config)) {
    needed.insert(spec.name);
    const TensorInfo* info = checkpoint.Find(spec.name);
    if (info == nullptr) {
      return absl::NotFoundError(
          absl::StrFormat("%s: tensor %s is missing; the config implies one of shape %s%s",
                          checkpoint.description(), spec.name, ShapeText(spec.shape),
                          spec.name == kLmHead ? " (tie_word_embeddings is false)" : ""));
    }
    if (info->shape != spec.shape) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "%s: tensor %s: the config implies shape %s, the file has %s", checkpoint.description(),
          spec.name, ShapeText(spec.shape), ShapeText(info->shape)));
    }
    if (!info->readable) {
      return absl::InvalidArgumentError(
          absl::StrFormat("%s: tensor %s is stored as %s, a type that is not supported",
                          checkpoint.description(), spec.name, info->stored_type));
    }
  }
  WarnOfSpareLayers(config, checkpoint);
  for (const std::string& name : checkpoint.Names()) {
    if (!needed.contains(name)) {
      Log(LogLevel::kDebug,
          absl::StrFormat("%s: tensor %s is not used", checkpoint.description(), name));
    }
  }
  return absl::OkStatus();
}

}  // namespace lockstep
