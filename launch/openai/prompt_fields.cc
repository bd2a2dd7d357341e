#include "launch/openai/prompt_fields.h"

#include <limits>

#include "launch/openai/json_text.h"

namespace lockstep {

namespace {

constexpr char kForms[] =
    "a string, a list of strings, a list of token ids, or a list of such lists";

bool IsTokenId(const Json& value) {
  return value.is_number_unsigned() &&
         value.get<uint64_t>() <= uint64_t{std::numeric_limits<int32_t>::max()};
}

PromptSource TextPrompt(Json& value) {
  return {.is_text = true, .text = std::move(value.get_ref<std::string&>()), .ids = {}};
}

}  // namespace

absl::StatusOr<std::vector<int32_t>> ReadTokenIds(const Json& value, const std::string& name) {
  if (!value.is_array()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s must be a list of token ids, found %s", name, QuotedJson(value)));
  }
  std::vector<int32_t> ids;
  ids.reserve(value.size());
  for (const Json& item : value) {
    if (!IsTokenId(item)) {
      return absl::InvalidArgumentError(
          absl::StrFormat("%s[%d] must be a token id, an integer from 0, found %s", name,
                          ids.size(), QuotedJson(item)));
    }
    ids.push_back(item.get<int32_t>());
  }
  return ids;
}

absl::StatusOr<std::vector<PromptSource>> ReadPrompts(Json& body, int64_t max_prompts) {
  const auto it = body.find("prompt");
  if (it == body.end() || it->is_null()) {
    return absl::InvalidArgumentError(absl::StrFormat("prompt is missing: it must be %s", kForms));
  }
  Json& prompt = *it;
  std::vector<PromptSource> prompts;
  if (prompt.is_string()) {
    prompts.push_back(TextPrompt(prompt));
    return prompts;
  }
  if (!prompt.is_array()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("prompt must be %s, found %s", kForms, QuotedJson(prompt)));
  }
  if (prompt.empty()) return absl::InvalidArgumentError("prompt is an empty list");
  if (prompt[0].is_number()) {
    LOCKSTEP_ASSIGN_OR_RETURN(std::vector<int32_t> ids, ReadTokenIds(prompt, "prompt"));
    prompts.push_back({.is_text = false, .text = {}, .ids = std::move(ids)});
    return prompts;
  }
  if (std::ssize(prompt) > max_prompts) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "prompt is a list of %d, more than %d at once", prompt.size(), max_prompts));
  }
  const bool texts = prompt[0].is_string();
  for (Json& item : prompt) {
    const std::string name = absl::StrFormat("prompt[%d]", prompts.size());
    if (texts && item.is_string()) {
      prompts.push_back(TextPrompt(item));
    } else if (!texts && item.is_array()) {
      LOCKSTEP_ASSIGN_OR_RETURN(std::vector<int32_t> ids, ReadTokenIds(item, name));
      prompts.push_back({.is_text = false, .text = {}, .ids = std::move(ids)});
    } else {
      return absl::InvalidArgumentError(
          absl::StrFormat("%s is %s, but prompt must be %s", name, QuotedJson(item), kForms));
    }
  }
  return prompts;
}

}  // namespace lockstep
