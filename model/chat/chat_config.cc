#include "model/chat/chat_config.h"

#include <filesystem>

#include "absl/strings/match.h"
#include "absl/strings/str_format.h"
#include "runtime/core/file.h"

namespace lockstep {
namespace {

constexpr const char* kSpecialTokens[] = {"bos_token", "eos_token", "unk_token", "sep_token",
                                          "pad_token", "cls_token", "mask_token"};

// The file's text; empty when there is no such file. A link to nothing is not "no such file".
absl::StatusOr<std::string> ReadIfPresent(const std::string& path) {
  absl::StatusOr<std::string> text = ReadFile(path);
  if (!absl::IsNotFound(text.status())) return text;
  std::error_code error;
  if (!std::filesystem::is_symlink(path, error)) return std::string();
  return absl::FailedPreconditionError(
      path + ": is a dangling link: the file that it leads to is not there");
}

absl::Status BadKey(const std::string& path, std::string_view key, std::string_view expected) {
  return absl::InvalidArgumentError(absl::StrFormat("%s: %s must be %s", path, key, expected));
}

absl::Status ReadSpecialTokens(const OrderedJson& json, const std::string& path,
                               ChatConfig* config) {
  for (const char* name : kSpecialTokens) {
    const auto it = json.find(name);
    if (it == json.end() || it->is_null()) continue;
    const OrderedJson* text = &*it;
    if (it->is_object() && it->contains("content")) text = &it->at("content");
    if (!text->is_string()) return BadKey(path, name, "a string or an object with \"content\"");
    config->special_tokens.emplace_back(name, text->get<std::string>());
  }
  return absl::OkStatus();
}

// A list of {name, template}.
absl::Status ReadNamedTemplates(const OrderedJson& list, const std::string& path,
                                ChatConfig* config) {
  for (const OrderedJson& entry : list) {
    const bool valid = entry.is_object() && entry.contains("name") && entry["name"].is_string() &&
                       entry.contains("template") && entry["template"].is_string();
    if (!valid)
      return BadKey(path, "chat_template", "a string or a list of {\"name\", \"template\"}");
    if (entry["name"] == "default") config->chat_template = entry["template"].get<std::string>();
    if (entry["name"] == "tool_use") config->tool_template = entry["template"].get<std::string>();
  }
  if (!config->chat_template.empty()) return absl::OkStatus();
  return absl::NotFoundError(
      absl::StrFormat("%s: none of the templates in chat_template is named \"default\"", path));
}

absl::Status ReadTemplateKey(const OrderedJson& json, const std::string& path, ChatConfig* config) {
  const auto it = json.find("chat_template");
  if (it == json.end() || it->is_null()) return absl::OkStatus();
  if (it->is_array()) return ReadNamedTemplates(*it, path, config);
  if (!it->is_string()) return BadKey(path, "chat_template", "a string or a list");
  config->chat_template = it->get<std::string>();
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::string> ReadChatTemplate(const std::string& path) {
  LOCKSTEP_ASSIGN_OR_RETURN(std::string text, ReadFile(path, FileKind::kAny));
  if (!text.empty()) return text;
  return absl::InvalidArgumentError(absl::StrFormat("%s: the chat template is empty", path));
}

absl::StatusOr<ChatConfig> LoadChatConfig(const std::string& dir,
                                          const std::string& template_file) {
  ChatConfig config;
  const std::string json_path = dir + "/tokenizer_config.json";
  const bool has_own = template_file.empty();
  config.where = has_own ? dir + "/chat_template.jinja" : template_file;
  LOCKSTEP_ASSIGN_OR_RETURN(config.chat_template, has_own ? ReadIfPresent(config.where)
                                                          : ReadChatTemplate(template_file));
  LOCKSTEP_ASSIGN_OR_RETURN(const std::string text, ReadIfPresent(json_path));
  if (!text.empty()) {
    LOCKSTEP_ASSIGN_OR_RETURN(const OrderedJson json, ParseOrderedJson(text, json_path));
    if (!json.is_object()) {
      return absl::InvalidArgumentError(absl::StrFormat("%s: a JSON object is needed", json_path));
    }
    LOCKSTEP_RETURN_IF_ERROR(ReadSpecialTokens(json, json_path, &config));
    if (config.chat_template.empty()) {
      config.where = json_path;
      LOCKSTEP_RETURN_IF_ERROR(ReadTemplateKey(json, json_path, &config));
    }
  }
  if (config.chat_template.empty()) {
    return absl::NotFoundError(absl::StrFormat(
        "no chat template in %s (chat_template.jinja, or chat_template in tokenizer_config.json)",
        dir));
  }
  return config;
}

absl::StatusOr<std::unique_ptr<ChatFormat>> ChatFormat::Create(const ChatConfig& config) {
  std::unique_ptr<ChatFormat> format(new ChatFormat());
  LOCKSTEP_ASSIGN_OR_RETURN(format->chat_template_,
                            ChatTemplate::Parse(config.chat_template, config.where));
  if (!config.tool_template.empty()) {
    LOCKSTEP_ASSIGN_OR_RETURN(format->tool_template_,
                              ChatTemplate::Parse(config.tool_template, config.where));
  }
  const std::string& for_tools =
      config.tool_template.empty() ? config.chat_template : config.tool_template;
  format->knows_tools_ = absl::StrContains(for_tools, "tools");
  format->special_tokens_ = config.special_tokens;
  return format;
}

absl::StatusOr<std::string> ChatFormat::Render(const OrderedJson& request) const {
  if (!request.is_object() || !request.contains("messages")) {
    return absl::InvalidArgumentError("a conversation must be a JSON object with \"messages\"");
  }
  if (!request["messages"].is_array()) {
    return absl::InvalidArgumentError("\"messages\" must be a list");
  }
  OrderedJson input = {{"tools", nullptr}, {"documents", nullptr}, {"add_generation_prompt", true}};
  for (const auto& [name, text] : special_tokens_) input[name] = text;
  for (const auto& [name, value] : request.items()) input[name] = value;
  const bool has_tools = !input["tools"].is_null();
  const ChatTemplate& chosen =
      has_tools && tool_template_ != nullptr ? *tool_template_ : *chat_template_;
  return chosen.Render(input);
}

}  // namespace lockstep
