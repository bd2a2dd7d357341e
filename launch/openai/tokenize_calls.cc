// POST /tokenize and /detokenize.
#include "absl/strings/str_join.h"
#include "launch/openai/call_preparer.h"
#include "launch/openai/json_text.h"
#include "launch/openai/request_body.h"
#include "model/json_fields.h"

namespace lockstep {

namespace {

absl::Status NeedTokenizer(const Tokenizer* tokenizer) {
  return tokenizer != nullptr ? absl::OkStatus()
                              : absl::InvalidArgumentError("the model has no tokenizer");
}

std::string TokenStrings(const Tokenizer& tokenizer, const std::vector<int32_t>& ids) {
  std::string json;
  for (const int32_t id : ids) {
    Separate(&json);
    AppendJsonString(tokenizer.IdToToken(id), &json);
  }
  return "[" + json + "]";
}

}  // namespace

absl::StatusOr<std::string> CallPreparer::Tokenize(std::string_view body) const {
  LOCKSTEP_RETURN_IF_ERROR(NeedTokenizer(model_.tokenizer));
  LOCKSTEP_ASSIGN_OR_RETURN(const Json json, ParseBody(body));
  JsonFields fields(json, kRequestWhere);
  const std::string model = fields.String("model").value_or("");
  const bool is_chat = fields.Has("messages");
  const bool special = fields.Bool("add_special_tokens").value_or(!is_chat);
  const bool wants_strings = fields.Bool("return_token_strs").value_or(false);
  const std::optional<std::string> prompt = is_chat ? std::nullopt : fields.String("prompt");
  LOCKSTEP_RETURN_IF_ERROR(WithoutWhere(fields.status()));
  LOCKSTEP_RETURN_IF_ERROR(CheckModel(model));
  std::vector<int32_t> ids;
  if (is_chat) {
    ChatPrompt chat;
    LOCKSTEP_ASSIGN_OR_RETURN(ids, EncodeChat(body, special, Tokenizer::kNoLimit, &chat));
  } else if (!prompt.has_value()) {
    return absl::InvalidArgumentError("prompt is missing: it must be a string, or send messages");
  } else {
    LOCKSTEP_ASSIGN_OR_RETURN(ids, EncodeText(*prompt, special, Tokenizer::kNoLimit));
  }
  std::string response = absl::StrFormat(
      "{\"count\":%d,\"max_model_len\":%d,\"tokens\":[%s],\"token_strs\":", ids.size(),
      engine_.max_model_len(), absl::StrJoin(ids, ","));
  response += wants_strings ? TokenStrings(*model_.tokenizer, ids) : "null";
  return response + "}";
}

absl::StatusOr<std::string> CallPreparer::Detokenize(std::string_view body) const {
  LOCKSTEP_RETURN_IF_ERROR(NeedTokenizer(model_.tokenizer));
  LOCKSTEP_ASSIGN_OR_RETURN(const Json json, ParseBody(body));
  JsonFields fields(json, kRequestWhere);
  const std::string model = fields.String("model").value_or("");
  LOCKSTEP_RETURN_IF_ERROR(WithoutWhere(fields.status()));
  LOCKSTEP_RETURN_IF_ERROR(CheckModel(model));
  if (!fields.Has("tokens")) {
    return absl::InvalidArgumentError("tokens is missing: it must be a list of token ids");
  }
  LOCKSTEP_ASSIGN_OR_RETURN(const std::vector<int32_t> ids, ReadTokenIds(json["tokens"], "tokens"));
  LOCKSTEP_ASSIGN_OR_RETURN(const std::string text,
                            model_.tokenizer->Decode(ids, /*skip_special_tokens=*/false));
  std::string response = "{\"prompt\":";
  AppendJsonString(text, &response);
  return response + "}";
}

}  // namespace lockstep
