// Fields of OpenAI's API, or of servers like this one, that change the meaning of a request and
// that this server does not do. To ignore them would be to answer another question.
#include <string>

#include "launch/openai/generation_fields.h"
#include "launch/openai/json_text.h"

namespace lockstep {

namespace {

constexpr char kNoGrammar[] = "answers cannot be constrained to a grammar, schema or list";

struct Unsupported {
  const char* field;
  const char* why;
};

// Refused whatever they hold, unless it is null, false, or empty.
constexpr Unsupported kBoth[] = {
    {"guided_json", kNoGrammar},
    {"guided_regex", kNoGrammar},
    {"guided_choice", kNoGrammar},
    {"guided_grammar", kNoGrammar},
    {"structured_outputs", kNoGrammar},
    {"structural_tag", kNoGrammar},
    {"use_beam_search", "there is no beam search"},
    {"logits_processors", "logits are changed by logit_bias and the penalties alone"},
    {"allowed_token_ids", "use logit_bias"},
    {"bad_words", "use logit_bias"},
    {"prompt_embeds", "a prompt is text or token ids"},
    {"truncate_prompt_tokens", "a prompt is never cut: cut it before it is sent"},
    {"include_stop_str_in_output", "the text ends before a stop string"},
    {"return_tokens_as_token_ids", "use return_token_ids"},
};
constexpr Unsupported kCompletion[] = {
    {"suffix", "there is no text insertion"},
};
constexpr Unsupported kChat[] = {
    {"echo", "use /v1/completions"},
    {"continue_final_message", "the answer is a message of its own"},
    {"chat_template", "the server's own template is used"},
    {"functions", "use tools"},
    {"function_call", "use tool_choice"},
    {"audio", "answers are text"},
    {"web_search_options", "there is no web search"},
};

bool SaysNothing(const Json& value) {
  return value.is_null() || value == Json(false) ||
         ((value.is_array() || value.is_object() || value.is_string()) && value.empty()) ||
         (value.is_string() && value.get_ref<const std::string&>().empty());
}

template <size_t kSize>
absl::Status CheckAbsent(const Json& body, const Unsupported (&fields)[kSize]) {
  for (const Unsupported& unsupported : fields) {
    const auto it = body.find(unsupported.field);
    if (it == body.end() || SaysNothing(*it)) continue;
    return absl::InvalidArgumentError(
        absl::StrFormat("%s is not supported: %s", unsupported.field, unsupported.why));
  }
  return absl::OkStatus();
}

absl::Status CheckResponseFormat(const Json& body) {
  const auto it = body.find("response_format");
  if (it == body.end() || it->is_null()) return absl::OkStatus();
  if (!it->is_object() || !it->contains("type")) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "response_format must be an object with a type, found %s", QuotedJson(*it)));
  }
  const Json& type = it->at("type");
  if (type == "text") return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("response_format is not supported with type %s, only \"text\": %s",
                      QuotedJson(type), kNoGrammar));
}

absl::Status CheckBestOf(const Json& body) {
  const auto best_of = body.find("best_of");
  if (best_of == body.end() || best_of->is_null()) return absl::OkStatus();
  const auto n = body.find("n");
  const Json wanted = n == body.end() || n->is_null() ? Json(1) : *n;
  if (*best_of == wanted) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("best_of is %s: it is supported only where it equals n, which is %s",
                      QuotedJson(*best_of), QuotedJson(wanted)));
}

absl::Status CheckModalities(const Json& body) {
  const auto it = body.find("modalities");
  if (it == body.end() || it->is_null() || *it == Json::array({"text"})) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("modalities is %s: answers are text alone", QuotedJson(*it)));
}

}  // namespace

absl::Status CheckUnsupportedFields(const Json& body, ApiKind kind) {
  LOCKSTEP_RETURN_IF_ERROR(CheckAbsent(body, kBoth));
  LOCKSTEP_RETURN_IF_ERROR(CheckResponseFormat(body));
  LOCKSTEP_RETURN_IF_ERROR(CheckBestOf(body));
  if (kind == ApiKind::kCompletion) return CheckAbsent(body, kCompletion);
  LOCKSTEP_RETURN_IF_ERROR(CheckAbsent(body, kChat));
  return CheckModalities(body);
}

}  // namespace lockstep
