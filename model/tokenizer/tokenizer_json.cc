// Reads a tokenizer.json.

#include <algorithm>

#include "model/tokenizer/json_fields.h"
#include "model/tokenizer/tokenizer.h"
#include "model/tokenizer/tokenizer_parts.h"
#include "model/tokenizer/utf8.h"
#include "runtime/core/file.h"
#include "runtime/core/log.h"

namespace lockstep {

namespace {

const Json& SectionOrNull(const Json& document, const char* key) {
  static const Json& null = *new Json(nullptr);
  const Json* section = FindField(document, key);
  return section == nullptr ? null : *section;
}

absl::Status RefuseIfSet(const Json& model, const char* key, const std::string& where) {
  const Json* field = FindField(model, key);
  if (field == nullptr || (field->is_string() && field->get_ref<const std::string&>().empty()) ||
      (field->is_number() && field->get<double>() == 0.0)) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrFormat("%s: \"%s\": %s is not supported", where, key, DumpJson(*field)));
}

void WarnIfNoMerges(const TokenizerParts& parts, const std::string& where) {
  if (!parts.merges.empty()) return;
  for (int32_t id = 0; id < parts.vocabulary.size(); ++id) {
    const std::string& token = parts.vocabulary.Token(id);
    if (token.empty() || token.size() == static_cast<size_t>(CharacterLength(token[0]))) continue;
    const bool is_added =
        std::any_of(parts.added_tokens.begin(), parts.added_tokens.end(),
                    [&](const AddedToken& added) { return added.content == token; });
    const bool is_byte = parts.bpe.byte_fallback && token.size() == 6 && token.rfind("<0x", 0) == 0;
    if (is_added || is_byte || token == parts.bpe.unk_token) continue;
    LogWarning(
        absl::StrFormat("%s: the merges are empty although the vocabulary has tokens of several "
                        "characters (\"%s\"): text becomes "
                        "single characters, and a model trained with merges answers nonsense",
                        where, token));
    return;
  }
}

absl::Status ReadModel(const Json& model, const std::string& where, TokenizerParts* parts) {
  // The oldest files leave the type out; such a model is BPE when it has merges.
  LOCKSTEP_ASSIGN_OR_RETURN(
      const std::string type,
      StringField(
          model, "type",
          FindField(model, "merges") != nullptr ? std::optional<std::string>("BPE") : std::nullopt,
          where));
  if (type != "BPE") return UnsupportedComponent(where, "model type", type);
  for (const char* key : {"dropout", "continuing_subword_prefix", "end_of_word_suffix"}) {
    LOCKSTEP_RETURN_IF_ERROR(RefuseIfSet(model, key, where));
  }
  LOCKSTEP_ASSIGN_OR_RETURN(parts->bpe.byte_fallback,
                            BoolField(model, "byte_fallback", false, where));
  LOCKSTEP_ASSIGN_OR_RETURN(parts->bpe.fuse_unk, BoolField(model, "fuse_unk", false, where));
  LOCKSTEP_ASSIGN_OR_RETURN(parts->bpe.ignore_merges,
                            BoolField(model, "ignore_merges", false, where));
  LOCKSTEP_ASSIGN_OR_RETURN(parts->bpe.unk_token, StringField(model, "unk_token", "", where));
  LOCKSTEP_ASSIGN_OR_RETURN(parts->vocabulary,
                            Vocabulary::FromJson(SectionOrNull(model, "vocab"), where + " vocab"));
  LOCKSTEP_ASSIGN_OR_RETURN(const Json* merges, ArrayField(model, "merges", where));
  LOCKSTEP_ASSIGN_OR_RETURN(parts->merges, ParseMerges(*merges, parts->vocabulary, where));
  return absl::OkStatus();
}

absl::Status ReadAddedTokens(const Json& document, const std::string& where,
                             TokenizerParts* parts) {
  if (FindField(document, "added_tokens") == nullptr) return absl::OkStatus();
  LOCKSTEP_ASSIGN_OR_RETURN(const Json* list, ArrayField(document, "added_tokens", where));
  for (size_t i = 0; i < list->size(); ++i) {
    const Json& item = (*list)[i];
    const std::string at = absl::StrFormat("%s: added_tokens[%d]", where, i);
    AddedToken token;
    LOCKSTEP_ASSIGN_OR_RETURN(const int64_t id, IntField(item, "id", std::nullopt, at));
    if (id < 0 || id >= int64_t{1} << 24)
      return absl::InvalidArgumentError(absl::StrFormat("%s: id %d is out of range", at, id));
    token.id = static_cast<int32_t>(id);
    LOCKSTEP_ASSIGN_OR_RETURN(token.content, StringField(item, "content", std::nullopt, at));
    LOCKSTEP_ASSIGN_OR_RETURN(token.special, BoolField(item, "special", false, at));
    LOCKSTEP_ASSIGN_OR_RETURN(token.normalized, BoolField(item, "normalized", !token.special, at));
    LOCKSTEP_ASSIGN_OR_RETURN(token.lstrip, BoolField(item, "lstrip", false, at));
    LOCKSTEP_ASSIGN_OR_RETURN(token.rstrip, BoolField(item, "rstrip", false, at));
    LOCKSTEP_ASSIGN_OR_RETURN(token.single_word, BoolField(item, "single_word", false, at));
    parts->added_tokens.push_back(std::move(token));
  }
  return absl::OkStatus();
}

// The ids of the entry `name` of a TemplateProcessing's special_tokens.
absl::Status AppendTemplateIds(const Json& processor, const std::string& name,
                               const std::string& where, std::vector<int32_t>* ids) {
  const Json* tokens = FindField(processor, "special_tokens");
  const Json* token = tokens == nullptr ? nullptr : FindField(*tokens, name.c_str());
  const Json* list = token == nullptr ? nullptr : FindField(*token, "ids");
  if (list == nullptr || !list->is_array()) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s: the template's token \"%s\" has no ids in special_tokens", where, name));
  }
  for (const Json& id : *list) {
    if (!id.is_number_integer())
      return absl::InvalidArgumentError(
          absl::StrFormat("%s: an id of \"%s\" is no integer", where, name));
    ids->push_back(id.get<int32_t>());
  }
  return absl::OkStatus();
}

absl::Status ReadTemplate(const Json& processor, const std::string& where,
                          std::vector<int32_t>* prefix, std::vector<int32_t>* suffix) {
  LOCKSTEP_ASSIGN_OR_RETURN(const Json* items, ArrayField(processor, "single", where));
  int sequences = 0;
  for (const Json& item : *items) {
    const Json* sequence = FindField(item, "Sequence");
    const Json* special = FindField(item, "SpecialToken");
    if (sequence != nullptr) {
      LOCKSTEP_ASSIGN_OR_RETURN(const std::string id,
                                StringField(*sequence, "id", std::nullopt, where));
      if (id != "A" || ++sequences > 1) {
        return absl::InvalidArgumentError(
            where + ": a template for one text must have the sequence A once");
      }
    } else if (special != nullptr) {
      LOCKSTEP_ASSIGN_OR_RETURN(const std::string id,
                                StringField(*special, "id", std::nullopt, where));
      LOCKSTEP_RETURN_IF_ERROR(
          AppendTemplateIds(processor, id, where, sequences == 0 ? prefix : suffix));
    } else {
      return absl::InvalidArgumentError(
          absl::StrFormat("%s: unknown template item %s", where, DumpJson(item)));
    }
  }
  if (sequences != 1)
    return absl::InvalidArgumentError(where +
                                      ": a template for one text must have the sequence A once");
  return absl::OkStatus();
}

// "sep": ["</s>", 2]
absl::Status AppendNamedId(const Json& processor, const char* key, const std::string& where,
                           std::vector<int32_t>* ids) {
  LOCKSTEP_ASSIGN_OR_RETURN(const Json* pair, ArrayField(processor, key, where));
  if (pair->size() != 2 || !(*pair)[1].is_number_integer()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s: \"%s\" must be [token, id]", where, key));
  }
  ids->push_back((*pair)[1].get<int32_t>());
  return absl::OkStatus();
}

// Processors of a Sequence apply from the inside out.
absl::Status ReadPostProcessor(const Json& processor, const std::string& where,
                               TokenizerParts* parts) {
  if (processor.is_null()) return absl::OkStatus();
  LOCKSTEP_ASSIGN_OR_RETURN(const std::string type,
                            StringField(processor, "type", std::nullopt, where));
  if (type == "ByteLevel") return absl::OkStatus();  // changes offsets alone
  if (type == "Sequence") {
    LOCKSTEP_ASSIGN_OR_RETURN(const Json* list, ArrayField(processor, "processors", where));
    for (const Json& part : *list) LOCKSTEP_RETURN_IF_ERROR(ReadPostProcessor(part, where, parts));
    return absl::OkStatus();
  }
  std::vector<int32_t> prefix, suffix;
  if (type == "TemplateProcessing") {
    LOCKSTEP_RETURN_IF_ERROR(ReadTemplate(processor, where, &prefix, &suffix));
  } else if (type == "RobertaProcessing" || type == "BertProcessing") {
    LOCKSTEP_RETURN_IF_ERROR(AppendNamedId(processor, "cls", where, &prefix));
    LOCKSTEP_RETURN_IF_ERROR(AppendNamedId(processor, "sep", where, &suffix));
  } else {
    return UnsupportedComponent(where, "post-processor", type);
  }
  parts->prefix.insert(parts->prefix.begin(), prefix.begin(), prefix.end());
  parts->suffix.insert(parts->suffix.end(), suffix.begin(), suffix.end());
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Tokenizer>> Tokenizer::FromJson(const Json& document,
                                                               const std::string& where) {
  if (!document.is_object())
    return absl::InvalidArgumentError(where + ": a tokenizer must be a JSON object");
  const Json* model = FindField(document, "model");
  if (model == nullptr) return absl::InvalidArgumentError(where + ": \"model\" is missing");
  TokenizerParts parts;
  LOCKSTEP_ASSIGN_OR_RETURN(
      parts.normalizer,
      Normalizer::Create(SectionOrNull(document, "normalizer"), where + ": normalizer"));
  LOCKSTEP_ASSIGN_OR_RETURN(
      parts.pre_tokenizer,
      PreTokenizer::Create(SectionOrNull(document, "pre_tokenizer"), where + ": pre_tokenizer"));
  LOCKSTEP_ASSIGN_OR_RETURN(
      parts.decoder, TokenDecoder::Create(SectionOrNull(document, "decoder"), where + ": decoder"));
  LOCKSTEP_RETURN_IF_ERROR(ReadPostProcessor(SectionOrNull(document, "post_processor"),
                                             where + ": post_processor", &parts));
  LOCKSTEP_RETURN_IF_ERROR(ReadAddedTokens(document, where, &parts));
  LOCKSTEP_RETURN_IF_ERROR(ReadModel(*model, where + ": model", &parts));
  WarnIfNoMerges(parts, where);
  return FromParts(std::move(parts), where);
}

absl::StatusOr<std::unique_ptr<Tokenizer>> Tokenizer::Load(const std::string& path) {
  LOCKSTEP_ASSIGN_OR_RETURN(const std::string text, ReadFile(path));
  LOCKSTEP_ASSIGN_OR_RETURN(const Json document, ParseJson(text, path));
  return FromJson(document, path);
}

}  // namespace lockstep
