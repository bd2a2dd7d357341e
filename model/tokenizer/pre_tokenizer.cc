#include "model/tokenizer/pre_tokenizer.h"

#include "model/tokenizer/byte_level.h"
#include "model/tokenizer/json_fields.h"
#include "model/tokenizer/utf8.h"

namespace lockstep {

namespace {

// GPT-2's pattern, which ByteLevel applies itself when use_regex is set.
constexpr std::string_view kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
constexpr std::string_view kDigits = R"(\p{N})";
constexpr std::string_view kPunctuation = R"([\p{P}$+<=>^`|~])";
constexpr std::string_view kWhitespace = R"(\s)";
constexpr std::string_view kWords = R"(\w+|[^\w\s]+)";

}  // namespace

absl::StatusOr<PreTokenizer> PreTokenizer::Create(const Json& json, const std::string& where) {
  PreTokenizer pre_tokenizer;
  LOCKSTEP_RETURN_IF_ERROR(pre_tokenizer.Append(json, where));
  std::vector<Step>& steps = pre_tokenizer.steps_;
  if (!steps.empty() && steps.back().kind == Kind::kMapBytes) {
    steps.pop_back();
    pre_tokenizer.pieces_are_bytes_ = true;
  }
  return pre_tokenizer;
}

absl::StatusOr<PreTokenizer::Behavior> PreTokenizer::ParseBehavior(
    const Json& json, std::optional<std::string> fallback, const std::string& where) {
  LOCKSTEP_ASSIGN_OR_RETURN(const std::string name, StringField(json, "behavior", fallback, where));
  if (name == "Removed") return Behavior::kRemoved;
  if (name == "Isolated") return Behavior::kIsolated;
  if (name == "MergedWithPrevious") return Behavior::kMergedWithPrevious;
  if (name == "MergedWithNext") return Behavior::kMergedWithNext;
  if (name == "Contiguous") return Behavior::kContiguous;
  return UnsupportedComponent(where, "behavior", name);
}

absl::Status PreTokenizer::AppendSplit(std::string_view pattern, Behavior behavior, bool invert,
                                       const std::string& where) {
  Step step{Kind::kSplit};
  LOCKSTEP_ASSIGN_OR_RETURN(step.regex, Regex::Create(pattern, where));
  step.behavior = behavior;
  step.invert = invert;
  steps_.push_back(std::move(step));
  return absl::OkStatus();
}

absl::Status PreTokenizer::AppendByteLevel(const Json& json, const std::string& where) {
  LOCKSTEP_ASSIGN_OR_RETURN(const bool add_prefix_space,
                            BoolField(json, "add_prefix_space", true, where));
  LOCKSTEP_ASSIGN_OR_RETURN(const bool use_regex, BoolField(json, "use_regex", true, where));
  if (add_prefix_space) steps_.push_back({Kind::kAddPrefixSpace});
  if (use_regex)
    LOCKSTEP_RETURN_IF_ERROR(AppendSplit(kGpt2Pattern, Behavior::kIsolated, false, where));
  steps_.push_back({Kind::kMapBytes});
  return absl::OkStatus();
}

absl::Status PreTokenizer::AppendMetaspace(const Json& json, const std::string& where) {
  Step step{Kind::kMetaspace};
  LOCKSTEP_ASSIGN_OR_RETURN(step.replacement,
                            StringField(json, "replacement", "\xE2\x96\x81", where));
  if (step.replacement.empty())
    return absl::InvalidArgumentError(where + ": Metaspace with an empty replacement");
  // Files of before 2024 say add_prefix_space; later ones say prepend_scheme, some of them both.
  const Json* old_spelling = FindField(json, "add_prefix_space");
  LOCKSTEP_ASSIGN_OR_RETURN(const bool add_prefix_space,
                            BoolField(json, "add_prefix_space", true, where));
  LOCKSTEP_ASSIGN_OR_RETURN(
      const std::string scheme,
      StringField(json, "prepend_scheme", add_prefix_space ? "always" : "never", where));
  if (scheme == "always") {
    step.prepend_scheme = PrependScheme::kAlways;
  } else if (scheme == "first") {
    step.prepend_scheme = PrependScheme::kFirst;
  } else if (scheme == "never") {
    step.prepend_scheme = PrependScheme::kNever;
  } else {
    return UnsupportedComponent(where, "prepend_scheme", scheme);
  }
  if (old_spelling != nullptr && !add_prefix_space && scheme != "never") {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s: Metaspace has add_prefix_space false but prepend_scheme \"%s\"", where, scheme));
  }
  LOCKSTEP_ASSIGN_OR_RETURN(const bool split, BoolField(json, "split", true, where));
  const std::string replacement = step.replacement;
  steps_.push_back(std::move(step));
  if (!split) return absl::OkStatus();
  Step cut{Kind::kSplit};
  LOCKSTEP_ASSIGN_OR_RETURN(cut.regex, Regex::CreateLiteral(replacement, where));
  cut.behavior = Behavior::kMergedWithNext;
  steps_.push_back(std::move(cut));
  return absl::OkStatus();
}

absl::Status PreTokenizer::Append(const Json& json, const std::string& where) {
  if (json.is_null()) return absl::OkStatus();
  LOCKSTEP_ASSIGN_OR_RETURN(const std::string type, StringField(json, "type", std::nullopt, where));
  if (type == "Sequence") {
    LOCKSTEP_ASSIGN_OR_RETURN(const Json* parts, ArrayField(json, "pretokenizers", where));
    for (const Json& part : *parts) LOCKSTEP_RETURN_IF_ERROR(Append(part, where));
    return absl::OkStatus();
  }
  if (type == "ByteLevel") return AppendByteLevel(json, where);
  if (type == "Metaspace") return AppendMetaspace(json, where);
  if (type == "WhitespaceSplit") return AppendSplit(kWhitespace, Behavior::kRemoved, false, where);
  if (type == "Whitespace") return AppendSplit(kWords, Behavior::kRemoved, true, where);
  if (type == "Digits") {
    LOCKSTEP_ASSIGN_OR_RETURN(const bool individual,
                              BoolField(json, "individual_digits", false, where));
    return AppendSplit(kDigits, individual ? Behavior::kIsolated : Behavior::kContiguous, false,
                       where);
  }
  if (type == "Punctuation") {
    LOCKSTEP_ASSIGN_OR_RETURN(const Behavior behavior, ParseBehavior(json, "Isolated", where));
    return AppendSplit(kPunctuation, behavior, false, where);
  }
  if (type == "Split") {
    Step step{Kind::kSplit};
    LOCKSTEP_ASSIGN_OR_RETURN(const PatternField pattern, ParsePattern(json, where));
    LOCKSTEP_ASSIGN_OR_RETURN(step.regex, pattern.Compile(where));
    LOCKSTEP_ASSIGN_OR_RETURN(step.behavior, ParseBehavior(json, std::nullopt, where));
    LOCKSTEP_ASSIGN_OR_RETURN(step.invert, BoolField(json, "invert", false, where));
    steps_.push_back(std::move(step));
    return absl::OkStatus();
  }
  return UnsupportedComponent(where, "pre-tokenizer", type);
}

namespace {

// Parts of `text`: the matches, and what lies between them.
struct Part {
  size_t begin, end;
  bool is_match;
};

// Calls fn(part) for the parts of [0, size) from left to right.
template <typename Fn>
void ForEachPart(const std::vector<Match>& matches, size_t size, bool invert, const Fn& fn) {
  size_t at = 0;
  for (const Match& match : matches) {
    if (match.begin > at) fn(Part{at, match.begin, invert});
    fn(Part{match.begin, match.end, !invert});
    at = match.end;
  }
  if (at < size) fn(Part{at, size, invert});
}

}  // namespace

absl::Status PreTokenizer::SplitPiece(const Step& step, const Piece& piece,
                                      PreTokenizerScratch* scratch) {
  LOCKSTEP_RETURN_IF_ERROR(step.regex->FindAll(piece.text, &scratch->matches));
  std::vector<Piece>& next = scratch->next;
  size_t begin = 0, end = 0;  // of the piece being put together
  bool last_is_match = false;
  const auto flush = [&] {
    if (end > begin)
      next.push_back({piece.text.substr(begin, end - begin), piece.at_start && begin == 0});
  };
  ForEachPart(scratch->matches, piece.text.size(), step.invert, [&](const Part& part) {
    bool joins = false;
    switch (step.behavior) {
      case Behavior::kRemoved:
      case Behavior::kIsolated:
        break;
      case Behavior::kContiguous:
        joins = part.is_match == last_is_match;
        break;
      case Behavior::kMergedWithPrevious:
        joins = part.is_match && !last_is_match;
        break;
      case Behavior::kMergedWithNext:
        joins = !part.is_match && last_is_match;
        break;
    }
    if (!joins) {
      flush();
      begin = part.begin;
    }
    // A removed match leaves the empty piece [end, end) behind.
    if (step.behavior == Behavior::kRemoved && part.is_match) begin = part.end;
    end = part.end;
    last_is_match = part.is_match;
  });
  flush();
  return absl::OkStatus();
}

void PreTokenizer::Rewrite(const Step& step, const Piece& piece, PreTokenizerScratch* scratch) {
  std::string text;
  if (step.kind == Kind::kMapBytes) {
    lockstep::AppendByteLevel(piece.text, &text);
  } else if (step.kind == Kind::kAddPrefixSpace) {
    if (piece.text.front() == ' ') {
      scratch->next.push_back(piece);
      return;
    }
    text = " ";
    text.append(piece.text);
  } else {
    for (const char c : piece.text) {
      if (c == ' ') {
        text.append(step.replacement);
      } else {
        text.push_back(c);
      }
    }
    const bool wanted = step.prepend_scheme == PrependScheme::kAlways ||
                        (step.prepend_scheme == PrependScheme::kFirst && piece.at_start);
    if (wanted && text.compare(0, step.replacement.size(), step.replacement) != 0)
      text.insert(0, step.replacement);
  }
  scratch->changed.push_back(std::move(text));
  scratch->next.push_back({scratch->changed.back(), piece.at_start});
}

absl::Status PreTokenizer::Split(std::string_view text, bool at_start,
                                 PreTokenizerScratch* scratch) const {
  scratch->pieces.clear();
  scratch->changed.clear();
  if (text.empty()) return absl::OkStatus();
  scratch->pieces.push_back({text, at_start});
  for (const Step& step : steps_) {
    scratch->next.clear();
    for (const Piece& piece : scratch->pieces) {
      if (step.kind == Kind::kSplit) {
        LOCKSTEP_RETURN_IF_ERROR(SplitPiece(step, piece, scratch));
      } else {
        Rewrite(step, piece, scratch);
      }
    }
    scratch->pieces.swap(scratch->next);
  }
  return absl::OkStatus();
}

}  // namespace lockstep
