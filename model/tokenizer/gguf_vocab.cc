#include "model/tokenizer/gguf_vocab.h"

#include <algorithm>

#include "model/tokenizer/tokenizer_parts.h"
#include "model/tokenizer/utf8.h"
#include "runtime/core/log.h"

namespace lockstep {

namespace {

enum TokenType {
  kNormal = 1,
  kUnknown = 2,
  kControl = 3,
  kUserDefined = 4,
  kUnused = 5,
  kByte = 6
};

#define LOCKSTEP_CONTRACTIONS "'s|'t|'re|'ve|'m|'ll|'d"
#define LOCKSTEP_CASELESS_CONTRACTIONS "(?i:" LOCKSTEP_CONTRACTIONS ")"
#define LOCKSTEP_SPACES R"(\s*[\r\n]+|\s+(?!\S)|\s+)"

// The patterns of published tokenizers, each a series of cuts that leave matches and what lies
// between as pieces.
constexpr const char* kGpt2 =
    LOCKSTEP_CONTRACTIONS R"(| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
constexpr const char* kLlama3 = LOCKSTEP_CASELESS_CONTRACTIONS
    R"(|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|)" LOCKSTEP_SPACES;
constexpr const char* kQwen2 = LOCKSTEP_CASELESS_CONTRACTIONS
    R"(|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|)" LOCKSTEP_SPACES;
#define LOCKSTEP_UPPER R"([\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}])"
#define LOCKSTEP_LOWER R"([\p{Ll}\p{Lm}\p{Lo}\p{M}])"
constexpr const char* kGpt4o =
    R"([^\r\n\p{L}\p{N}]?)" LOCKSTEP_UPPER "*" LOCKSTEP_LOWER "+" LOCKSTEP_CASELESS_CONTRACTIONS
    R"(?|[^\r\n\p{L}\p{N}]?)" LOCKSTEP_UPPER "+" LOCKSTEP_LOWER "*" LOCKSTEP_CASELESS_CONTRACTIONS
    R"(?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|)" LOCKSTEP_SPACES;
constexpr const char* kTekken = R"([^\r\n\p{L}\p{N}]?)" LOCKSTEP_UPPER "*" LOCKSTEP_LOWER
                                R"(+|[^\r\n\p{L}\p{N}]?)" LOCKSTEP_UPPER "+" LOCKSTEP_LOWER
                                R"(*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|)" LOCKSTEP_SPACES;
constexpr const char* kOneDigit = R"(\p{N})";
constexpr const char* kDigits = R"(\p{N}+)";
constexpr const char* kThreeDigits = "[0-9][0-9][0-9]";
constexpr const char* kPunctuation = R"([\p{P}$+<=>\^~|]+)";
constexpr const char* kFalconPunctuation = R"([\p{P}$+<=>\^~|`]+)";

struct PreTokenizerEntry {
  std::vector<std::string> names;  // of tokenizer.ggml.pre
  std::vector<std::string> patterns;
  bool ignore_merges = false;
  bool add_bos = false;  // where the file does not say
  bool nfc = false;
};

const std::vector<PreTokenizerEntry>& PreTokenizers() {
  static const auto& entries = *new std::vector<PreTokenizerEntry>{
      {{"gpt-2", "phi-2", "mpt", "olmo", "jais"}, {kGpt2}},
      {{"llama-bpe", "llama3", "llama-v3"}, {kLlama3}, true, true},
      {{"dbrx", "smaug-bpe"}, {kLlama3}},
      {{"qwen2", "deepseek-r1-qwen"}, {kQwen2}, false, false, true},
      {{"stablelm2", "megrez"}, {kQwen2}},
      {{"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"},
       {kOneDigit, kGpt2}},
      {{"falcon"}, {kFalconPunctuation, kGpt2, kThreeDigits}},
      {{"gpt-4o"}, {kGpt4o}},
      {{"tekken"}, {kTekken}, true, true},
      {{"default"}, {kPunctuation, kGpt2, kDigits, kThreeDigits}},
  };
  return entries;
}

absl::StatusOr<const PreTokenizerEntry*> FindPreTokenizer(const std::string& name,
                                                          const std::string& where) {
  std::string known;
  for (const PreTokenizerEntry& entry : PreTokenizers()) {
    for (const std::string& other : entry.names) {
      if (other == name) return &entry;
      known += (known.empty() ? "" : ", ") + other;
    }
  }
  return absl::InvalidArgumentError(absl::StrFormat(
      "%s: tokenizer.ggml.pre \"%s\" is not supported (supported: %s)", where, name, known));
}

absl::Status CheckLengths(const GgufVocab& vocab, const std::string& where) {
  const size_t count = vocab.tokens.size();
  if (count == 0)
    return absl::InvalidArgumentError(where + ": tokenizer.ggml.tokens is empty or missing");
  const auto check = [&](const char* key, size_t size) {
    if (size == 0 || size == count) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s: %s has %d entries, tokenizer.ggml.tokens %d", where, key, size, count));
  };
  LOCKSTEP_RETURN_IF_ERROR(check("tokenizer.ggml.scores", vocab.scores.size()));
  LOCKSTEP_RETURN_IF_ERROR(check("tokenizer.ggml.token_type", vocab.token_types.size()));
  for (size_t id = 0; id < count; ++id) {
    if (FindInvalidUtf8(vocab.tokens[id]) == std::string_view::npos) continue;
    return absl::InvalidArgumentError(
        absl::StrFormat("%s: tokenizer.ggml.tokens[%d] is not valid UTF-8", where, id));
  }
  const std::pair<const char*, std::optional<int32_t>> named[] = {{"bos", vocab.bos_token_id},
                                                                  {"eos", vocab.eos_token_id},
                                                                  {"unknown", vocab.unk_token_id},
                                                                  {"padding", vocab.pad_token_id}};
  for (const auto& [name, id] : named) {
    if (!id.has_value() || (*id >= 0 && static_cast<size_t>(*id) < count)) continue;
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s: tokenizer.ggml.%s_token_id is %d, but there are %d tokens", where, name, *id, count));
  }
  return absl::OkStatus();
}

int32_t TypeOf(const GgufVocab& vocab, size_t id) {
  return vocab.token_types.empty() ? kNormal : vocab.token_types[id];
}

void AddAddedTokens(const GgufVocab& vocab, TokenizerParts* parts) {
  for (size_t id = 0; id < vocab.tokens.size(); ++id) {
    const int32_t type = TypeOf(vocab, id);
    if (type != kControl && type != kUserDefined && type != kUnknown) continue;
    AddedToken token;
    token.id = static_cast<int32_t>(id);
    token.content = vocab.tokens[id];
    token.special = type != kUserDefined;
    parts->added_tokens.push_back(std::move(token));
  }
}

absl::Status AddTemplate(const GgufVocab& vocab, bool add_bos, const std::string& where,
                         TokenizerParts* parts) {
  if (vocab.add_bos_token.value_or(add_bos)) {
    if (!vocab.bos_token_id.has_value())
      return absl::InvalidArgumentError(where + ": tokenizer.ggml.bos_token_id is missing");
    parts->prefix.push_back(*vocab.bos_token_id);
  }
  if (vocab.add_eos_token.value_or(false)) {
    if (!vocab.eos_token_id.has_value())
      return absl::InvalidArgumentError(where + ": tokenizer.ggml.eos_token_id is missing");
    parts->suffix.push_back(*vocab.eos_token_id);
  }
  return absl::OkStatus();
}

absl::Status ReadGpt2(const GgufVocab& vocab, const std::string& where, TokenizerParts* parts) {
  if (vocab.pre.empty()) {
    LogWarning(where +
               ": tokenizer.ggml.pre is missing, \"default\" is used; the model may have been "
               "trained with another pre-tokenizer");
  }
  LOCKSTEP_ASSIGN_OR_RETURN(const PreTokenizerEntry* pre,
                            FindPreTokenizer(vocab.pre.empty() ? "default" : vocab.pre, where));
  Json steps = Json::array();
  for (const std::string& pattern : pre->patterns) {
    steps.push_back(
        {{"type", "Split"}, {"pattern", {{"Regex", pattern}}}, {"behavior", "Isolated"}});
  }
  steps.push_back({{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}});
  LOCKSTEP_ASSIGN_OR_RETURN(
      parts->pre_tokenizer,
      PreTokenizer::Create({{"type", "Sequence"}, {"pretokenizers", steps}}, where));
  if (pre->nfc) {
    LOCKSTEP_ASSIGN_OR_RETURN(parts->normalizer, Normalizer::Create({{"type", "NFC"}}, where));
  }
  LOCKSTEP_ASSIGN_OR_RETURN(parts->decoder, TokenDecoder::Create({{"type", "ByteLevel"}}, where));
  if (vocab.merges.empty())
    return absl::InvalidArgumentError(where + ": tokenizer.ggml.merges is empty or missing");
  LOCKSTEP_ASSIGN_OR_RETURN(
      parts->merges, ParseMerges(vocab.merges, parts->vocabulary, where + ": tokenizer.ggml"));
  parts->bpe.ignore_merges = pre->ignore_merges;
  return AddTemplate(vocab, pre->add_bos, where, parts);
}

// SentencePiece joins the neighbours whose joined token has the highest score, the leftmost of
// equals. As merges: every way to put a token together from two others, ranked by the token's
// score; equal scores share a rank.
std::vector<Merge> MergesByScore(const GgufVocab& vocab, const Vocabulary& vocabulary) {
  const auto usable = [&](int32_t id) {
    return TypeOf(vocab, id) == kNormal || TypeOf(vocab, id) == kUserDefined;
  };
  std::vector<int32_t> order;
  for (int32_t id = 0; id < vocabulary.size(); ++id) {
    if (usable(id)) order.push_back(id);
  }
  std::stable_sort(order.begin(), order.end(),
                   [&](int32_t a, int32_t b) { return vocab.scores[a] > vocab.scores[b]; });
  std::vector<Merge> merges;
  uint32_t rank = 0;
  for (size_t i = 0; i < order.size(); ++i) {
    if (i > 0 && vocab.scores[order[i]] != vocab.scores[order[i - 1]]) ++rank;
    const std::string_view token = vocabulary.Token(order[i]);
    for (size_t cut = 1; cut < token.size(); ++cut) {
      if ((token[cut] & 0xC0) == 0x80) continue;
      const int32_t left = vocabulary.Find(token.substr(0, cut));
      const int32_t right = vocabulary.Find(token.substr(cut));
      if (left >= 0 && right >= 0 && usable(left) && usable(right))
        merges.push_back({left, right, order[i], rank});
    }
  }
  return merges;
}

absl::Status ReadLlama(const GgufVocab& vocab, const std::string& where, TokenizerParts* parts) {
  if (vocab.scores.empty())
    return absl::InvalidArgumentError(where + ": tokenizer.ggml.scores is missing");
  for (size_t id = 0; id < vocab.scores.size(); ++id) {
    if (vocab.scores[id] == vocab.scores[id]) continue;
    return absl::InvalidArgumentError(
        absl::StrFormat("%s: tokenizer.ggml.scores[%d] is not a number", where, id));
  }
  const bool space_prefix = vocab.add_space_prefix.value_or(true);
  const std::string space = "\xE2\x96\x81";  // U+2581
  Json normalizers = Json::array();
  if (space_prefix) normalizers.push_back({{"type", "Prepend"}, {"prepend", space}});
  normalizers.push_back({{"type", "Replace"}, {"pattern", {{"String", " "}}}, {"content", space}});
  LOCKSTEP_ASSIGN_OR_RETURN(
      parts->normalizer,
      Normalizer::Create({{"type", "Sequence"}, {"normalizers", normalizers}}, where));
  Json decoders = {{{"type", "Replace"}, {"pattern", {{"String", space}}}, {"content", " "}},
                   {{"type", "ByteFallback"}},
                   {{"type", "Fuse"}}};
  if (space_prefix)
    decoders.push_back({{"type", "Strip"}, {"content", " "}, {"start", 1}, {"stop", 0}});
  LOCKSTEP_ASSIGN_OR_RETURN(
      parts->decoder, TokenDecoder::Create({{"type", "Sequence"}, {"decoders", decoders}}, where));
  parts->bpe.byte_fallback = true;
  parts->bpe.fuse_unk = true;
  if (vocab.unk_token_id.has_value()) parts->bpe.unk_token = vocab.tokens[*vocab.unk_token_id];
  parts->merges = MergesByScore(vocab, parts->vocabulary);
  return AddTemplate(vocab, true, where, parts);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Tokenizer>> TokenizerFromGguf(const GgufVocab& vocab,
                                                             const std::string& where) {
  LOCKSTEP_RETURN_IF_ERROR(CheckLengths(vocab, where));
  TokenizerParts parts;
  LOCKSTEP_ASSIGN_OR_RETURN(parts.vocabulary,
                            Vocabulary::FromList(vocab.tokens, where + ": tokenizer.ggml.tokens"));
  AddAddedTokens(vocab, &parts);
  if (vocab.model == "gpt2") {
    LOCKSTEP_RETURN_IF_ERROR(ReadGpt2(vocab, where, &parts));
  } else if (vocab.model == "llama") {
    LOCKSTEP_RETURN_IF_ERROR(ReadLlama(vocab, where, &parts));
  } else {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s: tokenizer.ggml.model \"%s\" is not supported (supported: gpt2, llama)",
                        where, vocab.model));
  }
  return Tokenizer::FromParts(std::move(parts), where);
}

}  // namespace lockstep
