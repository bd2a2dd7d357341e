#include "model/tokenizer/normalizer.h"

#include <utf8proc.h>

#include "model/tokenizer/json_fields.h"
#include "model/tokenizer/utf8.h"

namespace lockstep {

namespace {

void ReplaceAll(std::string_view pattern, std::string_view content, std::string* text) {
  size_t found = text->find(pattern);
  if (found == std::string::npos) return;
  std::string out;
  out.reserve(text->size() + text->size() / 2);
  size_t at = 0;
  for (; found != std::string::npos; found = text->find(pattern, at)) {
    out.append(*text, at, found - at);
    out.append(content);
    at = found + pattern.size();
  }
  out.append(*text, at);
  *text = std::move(out);
}

// Each character by itself: a capital sigma never becomes a final one, as in the reference.
void Lowercase(std::string* text) {
  std::string out;
  out.reserve(text->size());
  for (std::string_view rest = *text; !rest.empty();) {
    int length;
    const char32_t c = FirstCharacter(rest, &length);
    if (c == 0x130) {
      out.append("i\xCC\x87");  // the one capital whose lower case is two characters
    } else {
      AppendUtf8(static_cast<char32_t>(utf8proc_tolower(static_cast<utf8proc_int32_t>(c))), &out);
    }
    rest.remove_prefix(length);
  }
  *text = std::move(out);
}

bool StartsWithMark(std::string_view text) {
  if (text.empty()) return false;
  int length;
  switch (utf8proc_category(static_cast<utf8proc_int32_t>(FirstCharacter(text, &length)))) {
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
      return true;
    default:
      return false;
  }
}

void RemoveMarks(std::string* text) {
  std::string out;
  out.reserve(text->size());
  for (std::string_view rest = *text; !rest.empty();) {
    const int length = CharacterLength(rest[0]);
    if (!StartsWithMark(rest)) out.append(rest.substr(0, length));
    rest.remove_prefix(length);
  }
  *text = std::move(out);
}

}  // namespace

absl::StatusOr<Normalizer> Normalizer::Create(const Json& json, const std::string& where) {
  Normalizer normalizer;
  LOCKSTEP_RETURN_IF_ERROR(normalizer.Append(json, where));
  return normalizer;
}

absl::Status Normalizer::Append(const Json& json, const std::string& where) {
  if (json.is_null()) return absl::OkStatus();
  LOCKSTEP_ASSIGN_OR_RETURN(const std::string type, StringField(json, "type", std::nullopt, where));
  if (type == "Sequence") {
    LOCKSTEP_ASSIGN_OR_RETURN(const Json* parts, ArrayField(json, "normalizers", where));
    for (const Json& part : *parts) LOCKSTEP_RETURN_IF_ERROR(Append(part, where));
    return absl::OkStatus();
  }
  Step step;
  if (type == "NFC" || type == "NFD" || type == "NFKC" || type == "NFKD") {
    step.kind = Kind::kUnicode;
    step.compose = type.back() == 'C';
    step.compatibility = type.size() == 4;
  } else if (type == "Lowercase") {
    step.kind = Kind::kLowercase;
  } else if (type == "StripAccents") {
    step.kind = Kind::kStripAccents;
  } else if (type == "Prepend") {
    step.kind = Kind::kPrepend;
    LOCKSTEP_ASSIGN_OR_RETURN(step.content, StringField(json, "prepend", std::nullopt, where));
  } else if (type == "Strip") {
    step.kind = Kind::kStrip;
    LOCKSTEP_ASSIGN_OR_RETURN(step.left, BoolField(json, "strip_left", true, where));
    LOCKSTEP_ASSIGN_OR_RETURN(step.right, BoolField(json, "strip_right", true, where));
  } else if (type == "Replace") {
    LOCKSTEP_ASSIGN_OR_RETURN(const PatternField pattern, ParsePattern(json, where));
    LOCKSTEP_ASSIGN_OR_RETURN(step.content, StringField(json, "content", std::nullopt, where));
    // Compiled for a string too: an empty one is refused there.
    LOCKSTEP_ASSIGN_OR_RETURN(step.regex, pattern.Compile(where));
    step.kind = pattern.is_regex ? Kind::kReplaceRegex : Kind::kReplaceString;
    step.pattern = pattern.text;
  } else {
    return UnsupportedComponent(where, "normalizer", type);
  }
  steps_.push_back(std::move(step));
  return absl::OkStatus();
}

absl::Status Normalizer::ApplyStep(const Step& step, std::string* text, bool* start_removed) {
  switch (step.kind) {
    case Kind::kUnicode:
      *text = UnicodeNormalForm(*text, step.compose, step.compatibility);
      break;
    case Kind::kLowercase:
      Lowercase(text);
      break;
    case Kind::kStripAccents:
      *start_removed |= StartsWithMark(*text);
      RemoveMarks(text);
      break;
    case Kind::kPrepend:
      if (!text->empty()) text->insert(0, step.content);
      break;
    case Kind::kReplaceString:
      ReplaceAll(step.pattern, step.content, text);
      break;
    case Kind::kReplaceRegex: {
      std::string out;
      size_t at = 0;
      Regex::Finder finder(*step.regex, *text);
      for (Match match;;) {
        LOCKSTEP_ASSIGN_OR_RETURN(const bool found, finder.Next(&match));
        if (!found) break;
        out.append(*text, at, match.begin - at);
        out.append(step.content);
        at = match.end;
      }
      out.append(*text, at);
      *text = std::move(out);
      break;
    }
    case Kind::kStrip: {
      std::string_view kept = *text;
      if (step.left) kept = StripLeft(kept);
      *start_removed |= kept.size() < text->size();
      if (step.right) kept = StripRight(kept);
      *text = std::string(kept);
      break;
    }
  }
  return absl::OkStatus();
}

absl::Status Normalizer::Apply(std::string* text, bool* start_removed) const {
  for (const Step& step : steps_) LOCKSTEP_RETURN_IF_ERROR(ApplyStep(step, text, start_removed));
  return absl::OkStatus();
}

}  // namespace lockstep
