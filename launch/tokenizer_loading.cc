#include "launch/tokenizer_loading.h"

#include <filesystem>
#include <system_error>

#include "model/checkpoint/checked_file.h"
#include "model/checkpoint/gguf.h"

namespace lockstep {
namespace {

// Whether MODEL is a folder; NotFound when there is nothing of that name.
absl::StatusOr<bool> IsFolder(const std::string& model) {
  const absl::Status found = CheckPath(model);
  if (absl::IsNotFound(found)) {
    return absl::NotFoundError(absl::StrFormat("%s: no such file or folder", model));
  }
  LOCKSTEP_RETURN_IF_ERROR(found);
  std::error_code error;
  return std::filesystem::is_directory(model, error);
}

absl::StatusOr<ChatConfig> LoadGgufChatConfig(const std::string& path,
                                              const std::string& template_file) {
  LOCKSTEP_ASSIGN_OR_RETURN(GgufText text, ReadGgufText(path));
  if (!template_file.empty()) {
    LOCKSTEP_ASSIGN_OR_RETURN(text.chat_template, ReadChatTemplate(template_file));
  }
  if (!text.chat_template.has_value()) {
    return absl::NotFoundError(
        absl::StrFormat("no chat template in %s (metadata tokenizer.chat_template)", path));
  }
  ChatConfig config;
  config.where = template_file.empty() ? path : template_file;
  config.chat_template = *std::move(text.chat_template);
  if (!text.bos_token.empty()) config.special_tokens.emplace_back("bos_token", text.bos_token);
  if (!text.eos_token.empty()) config.special_tokens.emplace_back("eos_token", text.eos_token);
  return config;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Tokenizer>> LoadTokenizer(const std::string& model) {
  LOCKSTEP_ASSIGN_OR_RETURN(const bool is_folder, IsFolder(model));
  if (is_folder) {
    LOCKSTEP_RETURN_IF_ERROR(CheckPath(model + "/tokenizer.json"));
    return Tokenizer::Load(model + "/tokenizer.json");
  }
  LOCKSTEP_ASSIGN_OR_RETURN(const GgufText text, ReadGgufText(model));
  return TokenizerFromGguf(text.vocab, model);
}

absl::StatusOr<std::unique_ptr<ChatFormat>> LoadChatFormat(const std::string& model,
                                                           const std::string& template_file) {
  LOCKSTEP_ASSIGN_OR_RETURN(const bool is_folder, IsFolder(model));
  LOCKSTEP_ASSIGN_OR_RETURN(
      const ChatConfig config,
      is_folder ? LoadChatConfig(model, template_file) : LoadGgufChatConfig(model, template_file));
  return ChatFormat::Create(config);
}

}  // namespace lockstep
