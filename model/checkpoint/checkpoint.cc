#include "model/checkpoint/checkpoint.h"

#include <filesystem>

#include "model/checkpoint/checked_file.h"
#include "model/checkpoint/dummy.h"
#include "model/checkpoint/gguf.h"
#include "model/checkpoint/gguf_file.h"
#include "model/checkpoint/safetensors.h"
#include "model/checkpoint/tensor_names.h"
#include "model/checkpoint/unique_json.h"
#include "model/checkpoint/validate.h"
#include "runtime/core/file.h"

namespace lockstep {

namespace {

constexpr char kWhatModelMayBe[] =
    "MODEL is a folder in Hugging Face's layout (config.json, model.safetensors, tokenizer.json) "
    "or "
    "a .gguf file; names of models on a hub are not downloaded";

absl::StatusOr<Json> ReadJson(const std::string& path) {
  LOCKSTEP_ASSIGN_OR_RETURN(const std::string text, ReadFile(path));
  return ParseUniqueJson(text, path);
}

absl::StatusOr<Json> ReadConfigJson(const std::string& folder) {
  if (const absl::Status found = CheckPath(folder); absl::IsNotFound(found)) {
    return absl::NotFoundError(
        absl::StrFormat("%s: no such file or folder; %s", folder, kWhatModelMayBe));
  } else if (!found.ok()) {
    return found;
  }
  std::error_code error;
  if (!std::filesystem::is_directory(folder, error)) {
    return absl::NotFoundError(
        absl::StrFormat("%s: is a file, but no GGUF file; %s", folder, kWhatModelMayBe));
  }
  const std::string path = folder + "/config.json";
  if (const absl::Status found = CheckPath(path); absl::IsNotFound(found)) {
    return absl::NotFoundError(
        absl::StrFormat("%s: the folder has no config.json; %s", folder, kWhatModelMayBe));
  } else if (!found.ok()) {
    return found;
  }
  return ReadJson(path);
}

// Fills `source.generation` where the folder has the file.
absl::Status ReadGeneration(const Json& config, ModelSource& source) {
  const std::string path = source.path + "/generation_config.json";
  const absl::Status found = CheckPath(path);
  if (absl::IsNotFound(found)) return absl::OkStatus();
  LOCKSTEP_RETURN_IF_ERROR(found);
  LOCKSTEP_ASSIGN_OR_RETURN(const Json json, ReadJson(path));
  LOCKSTEP_ASSIGN_OR_RETURN(source.generation, ParseGenerationConfig(json, path));
  // An id that the config class assumed gives way to ids that a file states.
  if (!config.contains("eos_token_id") && !source.generation.eos_token_ids.empty()) {
    source.config.eos_token_ids.clear();
  }
  return absl::OkStatus();
}

// What --dtype auto means where config.json names no dtype: the type the weights are stored in.
void DTypeFromWeights(const Json& config, ModelSource& source) {
  if (config.contains("dtype") || config.contains("torch_dtype")) return;
  const std::string& stored = source.checkpoint->Find(kEmbedTokens)->stored_type;
  if (stored == "F32") source.config.dtype = DType::kF32;
  if (stored == "F16") source.config.dtype = DType::kF16;
}

// Leaves out what says where a copy came from, and not what it is.
std::vector<std::pair<std::string, std::string>> Stated(const Json& fields) {
  std::vector<std::pair<std::string, std::string>> stated;
  for (const auto& [name, value] : fields.items()) {
    if (name != "_name_or_path" && name != "transformers_version") {
      stated.emplace_back(name, DumpJson(value));
    }
  }
  return stated;
}

absl::StatusOr<ModelSource> OpenFolder(const std::string& path, LoadFormat format,
                                       bool use_generation_config) {
  ModelSource source;
  source.path = path;
  LOCKSTEP_ASSIGN_OR_RETURN(const Json config, ReadConfigJson(path));
  LOCKSTEP_ASSIGN_OR_RETURN(source.config, ParseModelConfig(config, path + "/config.json"));
  source.stated = Stated(config);
  if (use_generation_config) LOCKSTEP_RETURN_IF_ERROR(ReadGeneration(config, source));
  if (format != LoadFormat::kAuto) {
    source.checkpoint = MakeDummyCheckpoint(path, source.config);
    return source;
  }
  LOCKSTEP_ASSIGN_OR_RETURN(source.checkpoint, OpenSafetensorsFolder(path));
  LOCKSTEP_RETURN_IF_ERROR(ValidateTensors(source.config, *source.checkpoint));
  DTypeFromWeights(config, source);
  return source;
}

// Whether MODEL is a GGUF file: by its name, so that a damaged one is told as such, or its content.
bool IsGguf(const std::string& path) {
  std::error_code error;
  // What leads nowhere is told by the folder's reader.
  if (!CheckPath(path).ok() || std::filesystem::is_directory(path, error)) return false;
  return path.ends_with(".gguf") || IsGgufFile(path);
}

absl::StatusOr<ModelSource> OpenGgufModel(const std::string& path, LoadFormat format) {
  LOCKSTEP_ASSIGN_OR_RETURN(GgufModel model, OpenGguf(path));
  ModelSource source;
  source.path = path;
  source.config = std::move(model.config);
  source.stated = Stated(model.metadata);
  if (format != LoadFormat::kAuto) {
    source.checkpoint = MakeDummyCheckpoint(path, source.config);
    return source;
  }
  source.checkpoint = std::move(model.checkpoint);
  LOCKSTEP_RETURN_IF_ERROR(ValidateTensors(source.config, *source.checkpoint));
  return source;
}

}  // namespace

std::optional<DType> StoredDType(const TensorInfo& info) {
  // Both formats have the same names for these three.
  if (info.stored_type == "F32") return DType::kF32;
  if (info.stored_type == "F16") return DType::kF16;
  if (info.stored_type == "BF16") return DType::kBF16;
  return std::nullopt;
}

absl::StatusOr<ModelSource> OpenModel(const std::string& path, LoadFormat format,
                                      bool use_generation_config) {
  return IsGguf(path) ? OpenGgufModel(path, format)
                      : OpenFolder(path, format, use_generation_config);
}

absl::StatusOr<ModelConfig> OpenModelConfig(const std::string& path) {
  if (IsGguf(path)) {
    LOCKSTEP_ASSIGN_OR_RETURN(GgufModel model, OpenGguf(path));
    return std::move(model.config);
  }
  LOCKSTEP_ASSIGN_OR_RETURN(const Json config, ReadConfigJson(path));
  return ParseModelConfig(config, path + "/config.json");
}

}  // namespace lockstep
