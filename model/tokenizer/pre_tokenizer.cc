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
// Whitespace's \w+|[^\w\s]+, in which \w is that of Unicode's UTS 18.
#define LOCKSTEP_WORD R"(\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\x{200c}\x{200d})"
constexpr std::string_view kWords = "[" LOCKSTEP_WORD "]+|[^\\s" LOCKSTEP_WORD "]+";

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

// Cuts the piece at step `index`'s matches and hands each part on.
absl::Status PreTokenizer::RunSplit(size_t index, const Piece& piece, const Sink& sink) const {
  const Step& step = steps_[index];
  size_t begin = 0, end = 0;  // of the part being put together
  bool last_is_match = false;
  const auto flush = [&] {
    if (end == begin) return absl::OkStatus();
    return RunFrom(index + 1, {piece.text.substr(begin, end - begin), piece.at_start && begin == 0},
                   sink);
  };
  // Takes the next stretch, a match or what lies between matches.
  const auto add = [&](size_t stretch_begin, size_t stretch_end, bool is_match) {
    bool joins = false;
    if (step.behavior == Behavior::kContiguous) joins = is_match == last_is_match;
    if (step.behavior == Behavior::kMergedWithPrevious) joins = is_match && !last_is_match;
    if (step.behavior == Behavior::kMergedWithNext) joins = !is_match && last_is_match;
    if (!joins) {
      LOCKSTEP_RETURN_IF_ERROR(flush());
      // A removed match leaves an empty part behind.
      begin = step.behavior == Behavior::kRemoved && is_match ? stretch_end : stretch_begin;
    }
    end = stretch_end;
    last_is_match = is_match;
    return absl::OkStatus();
  };
  Regex::Finder finder(*step.regex, piece.text);
  size_t at = 0;
  for (Match match;; at = match.end) {
    LOCKSTEP_ASSIGN_OR_RETURN(const bool found, finder.Next(&match));
    const size_t gap_end = found ? match.begin : piece.text.size();
    if (gap_end > at) LOCKSTEP_RETURN_IF_ERROR(add(at, gap_end, step.invert));
    if (!found) break;
    LOCKSTEP_RETURN_IF_ERROR(add(match.begin, match.end, !step.invert));
  }
  return flush();
}

std::string PreTokenizer::Rewrite(const Step& step, const Piece& piece) {
  std::string text;
  if (step.kind == Kind::kMapBytes) {
    lockstep::AppendByteLevel(piece.text, &text);
  } else if (step.kind == Kind::kAddPrefixSpace) {
    if (piece.text.front() != ' ') text.push_back(' ');
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
  return text;
}

absl::Status PreTokenizer::RunFrom(size_t index, const Piece& piece, const Sink& sink) const {
  if (index == steps_.size()) {
    sink(piece.text);
    return absl::OkStatus();
  }
  const Step& step = steps_[index];
  if (step.kind == Kind::kSplit) return RunSplit(index, piece, sink);
  const std::string text = Rewrite(step, piece);
  return RunFrom(index + 1, {text, piece.at_start}, sink);
}

absl::Status PreTokenizer::Split(std::string_view text, bool at_start, const Sink& sink) const {
  if (text.empty()) return absl::OkStatus();
  return RunFrom(0, {text, at_start}, sink);
}

}  // namespace lockstep
