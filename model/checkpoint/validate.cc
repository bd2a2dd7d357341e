#include "model/checkpoint/validate.h"

#include <set>

#include "model/checkpoint/tensor_names.h"
#include "runtime/core/log.h"

namespace lockstep {

namespace {

std::string ShapeText(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (const int64_t size : shape) absl::StrAppend(&text, text.size() > 1 ? ", " : "", size);
  return text + "]";
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
  for (const std::string& name : checkpoint.Names()) {
    if (!needed.contains(name)) {
      Log(LogLevel::kDebug,
          absl::StrFormat("%s: tensor %s is not used", checkpoint.description(), name));
    }
  }
  return absl::OkStatus();
}

}  // namespace lockstep
