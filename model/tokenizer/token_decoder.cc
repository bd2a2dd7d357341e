#include "model/tokenizer/token_decoder.h"

#include "model/tokenizer/byte_level.h"
#include "model/tokenizer/json_fields.h"
#include "model/tokenizer/utf8.h"

namespace lockstep {

namespace {

// The byte of a byte token "<0xAB>", or -1.
int ParseByteToken(std::string_view token) {
  if (token.size() != 6 || token.substr(0, 3) != "<0x" || token[5] != '>') return -1;
  int value = 0;
  for (const char c : token.substr(3, 2)) {
    int digit;
    if (c >= '0' && c <= '9') {
      digit = c - '0';
    } else if (c >= 'A' && c <= 'F') {
      digit = c - 'A' + 10;
    } else if (c >= 'a' && c <= 'f') {
      digit = c - 'a' + 10;
    } else {
      return -1;
    }
    value = value * 16 + digit;
  }
  return value;
}

// Length of the longest proper prefix of `pattern` that ends `text`.
size_t PartialMatch(std::string_view text, std::string_view pattern) {
  size_t length = std::min(text.size(), pattern.size() - 1);
  while (length > 0 && text.substr(text.size() - length) != pattern.substr(0, length)) --length;
  return length;
}

}  // namespace

absl::StatusOr<TokenDecoder> TokenDecoder::Create(const Json& json, const std::string& where) {
  TokenDecoder decoder;
  if (json.is_null()) {
    decoder.steps_.push_back({Kind::kJoinWithSpace});
    return decoder;
  }
  LOCKSTEP_RETURN_IF_ERROR(decoder.Append(json, where));
  return decoder;
}

absl::Status TokenDecoder::Append(const Json& json, const std::string& where) {
  LOCKSTEP_ASSIGN_OR_RETURN(const std::string type, StringField(json, "type", std::nullopt, where));
  if (type == "Sequence") {
    LOCKSTEP_ASSIGN_OR_RETURN(const Json* parts, ArrayField(json, "decoders", where));
    for (const Json& part : *parts) LOCKSTEP_RETURN_IF_ERROR(Append(part, where));
    return absl::OkStatus();
  }
  if (type == "Replace") return AppendReplace(json, where);
  bool fused = false;
  for (const Step& step : steps_)
    fused |= step.kind == Kind::kFuse || step.kind == Kind::kByteLevel;
  Step step;
  if (type == "ByteLevel" || type == "ByteFallback") {
    step.kind = type == "ByteLevel" ? Kind::kByteLevel : Kind::kByteFallback;
    if (fused) return UnsupportedComponent(where, "after tokens are joined, decoder", type);
  } else if (type == "Fuse") {
    step.kind = Kind::kFuse;
  } else if (type == "Strip") {
    step.kind = Kind::kStrip;
    LOCKSTEP_ASSIGN_OR_RETURN(step.pattern, StringField(json, "content", std::nullopt, where));
    LOCKSTEP_ASSIGN_OR_RETURN(step.start, IntField(json, "start", std::nullopt, where));
    LOCKSTEP_ASSIGN_OR_RETURN(step.stop, IntField(json, "stop", std::nullopt, where));
    if (step.pattern.empty() ||
        step.pattern.size() != static_cast<size_t>(CharacterLength(step.pattern[0]))) {
      return absl::InvalidArgumentError(where + ": Strip needs one character as \"content\"");
    }
  } else if (type == "Metaspace") {
    step.kind = Kind::kMetaspace;
    LOCKSTEP_ASSIGN_OR_RETURN(step.pattern,
                              StringField(json, "replacement", "\xE2\x96\x81", where));
    if (step.pattern.empty())
      return absl::InvalidArgumentError(where + ": Metaspace with an empty replacement");
    LOCKSTEP_ASSIGN_OR_RETURN(const bool add_prefix_space,
                              BoolField(json, "add_prefix_space", true, where));
    LOCKSTEP_ASSIGN_OR_RETURN(
        const std::string scheme,
        StringField(json, "prepend_scheme", add_prefix_space ? "always" : "never", where));
    step.drop_first = scheme != "never";
  } else {
    return UnsupportedComponent(where, "decoder", type);
  }
  steps_.push_back(std::move(step));
  return absl::OkStatus();
}

absl::Status TokenDecoder::AppendReplace(const Json& json, const std::string& where) {
  Step step{Kind::kReplace};
  LOCKSTEP_ASSIGN_OR_RETURN(const PatternField pattern, ParsePattern(json, where));
  LOCKSTEP_ASSIGN_OR_RETURN(step.content, StringField(json, "content", std::nullopt, where));
  if (pattern.is_regex) {
    // A regular expression over a whole text could change what was already streamed.
    return UnsupportedComponent(where, "decoder Replace with the regular expression", pattern.text);
  }
  if (pattern.text.empty())
    return absl::InvalidArgumentError(where + ": Replace with an empty pattern");
  step.pattern = pattern.text;
  steps_.push_back(std::move(step));
  return absl::OkStatus();
}

TokenDecoderState TokenDecoder::NewState() const {
  TokenDecoderState state;
  state.steps.resize(steps_.size());
  return state;
}

void TokenDecoder::Push(std::string_view token, TokenDecoderState* state, std::string* out) const {
  Feed(0, token, true, state, out);
}

void TokenDecoder::Finish(TokenDecoderState* state, std::string* out) const {
  for (size_t i = 0; i < steps_.size(); ++i) FinishStep(i, state, out);
  *state = NewState();
}

std::string TokenDecoder::TokenBytes(std::string_view token) const {
  std::string bytes(token);
  for (const Step& step : steps_) {
    switch (step.kind) {
      case Kind::kByteLevel: {
        std::string decoded;
        AppendByteLevelDecoded(bytes, &decoded);
        bytes = std::move(decoded);
        break;
      }
      case Kind::kByteFallback:
        if (const int byte = ParseByteToken(bytes); byte >= 0) {
          return std::string(1, static_cast<char>(byte));
        }
        break;
      case Kind::kReplace:
      case Kind::kMetaspace: {
        const std::string content = step.kind == Kind::kReplace ? step.content : " ";
        for (size_t at = 0; (at = bytes.find(step.pattern, at)) != std::string::npos;) {
          bytes.replace(at, step.pattern.size(), content);
          at += content.size();
        }
        break;
      }
      case Kind::kJoinWithSpace:
        bytes.insert(0, 1, ' ');
        break;
      case Kind::kFuse:   // joins tokens
      case Kind::kStrip:  // the ends of the text
        break;
    }
  }
  return bytes;
}

void TokenDecoder::FeedBytes(size_t index, bool final, TokenDecoderState* state,
                             std::string* out) const {
  std::string& held = state->steps[index].held;
  std::string text;
  held.erase(0, AppendLossyUtf8(held, final, &text));
  if (!text.empty() || final) Feed(index + 1, text, final, state, out);
}

// The reference takes a run of byte tokens as a whole: if it is no valid UTF-8, every byte becomes
// a U+FFFD token.
void TokenDecoder::FlushByteRun(size_t index, TokenDecoderState* state, std::string* out) const {
  const std::string run = std::exchange(state->steps[index].held, {});
  if (run.empty()) return;
  if (FindInvalidUtf8(run) == std::string_view::npos) {
    Feed(index + 1, run, true, state, out);
  } else {
    for (size_t i = 0; i < run.size(); ++i)
      Feed(index + 1, kReplacementCharacter, true, state, out);
  }
}

void TokenDecoder::FeedReplace(size_t index, std::string_view text, bool token_end,
                               TokenDecoderState* state, std::string* out) const {
  const Step& step = steps_[index];
  std::string pending = std::exchange(state->steps[index].held, {});
  pending.append(text);
  std::string replaced;
  size_t at = 0;
  for (size_t found; (found = pending.find(step.pattern, at)) != std::string::npos;) {
    replaced.append(pending, at, found - at);
    replaced.append(step.content);
    at = found + step.pattern.size();
  }
  const std::string_view rest = std::string_view(pending).substr(at);
  const size_t keep = token_end ? 0 : PartialMatch(rest, step.pattern);
  replaced.append(rest.substr(0, rest.size() - keep));
  state->steps[index].held = rest.substr(rest.size() - keep);
  Feed(index + 1, replaced, token_end, state, out);
}

void TokenDecoder::FeedStrip(size_t index, std::string_view text, bool token_end,
                             TokenDecoderState* state, std::string* out) const {
  const Step& step = steps_[index];
  TokenDecoderState::Step& own = state->steps[index];
  std::string kept;
  while (!text.empty()) {
    const std::string_view character = text.substr(0, CharacterLength(text[0]));
    text.remove_prefix(character.size());
    const bool strippable = character == step.pattern;
    if (!own.in_token && strippable && own.count < step.start) {
      ++own.count;
      continue;
    }
    own.in_token = true;
    if (strippable) {
      // Only the last `stop` of a run can be trailing ones.
      if (++own.held_content <= step.stop) continue;
      --own.held_content;
    } else {
      for (; own.held_content > 0; --own.held_content) kept.append(step.pattern);
    }
    kept.append(character);
  }
  if (token_end) own = {};
  Feed(index + 1, kept, token_end, state, out);
}

void TokenDecoder::FeedMetaspace(size_t index, std::string_view text, bool token_end,
                                 TokenDecoderState* state, std::string* out) const {
  const Step& step = steps_[index];
  TokenDecoderState::Step& own = state->steps[index];
  std::string mapped;
  size_t at = 0;
  for (size_t found; (found = text.find(step.pattern, at)) != std::string_view::npos;) {
    mapped.append(text.substr(at, found - at));
    if (own.count > 0 || !step.drop_first) mapped.push_back(' ');
    at = found + step.pattern.size();
  }
  mapped.append(text.substr(at));
  if (token_end) ++own.count;
  Feed(index + 1, mapped, token_end, state, out);
}

// Gives `text`, a part of a token or all of it, to step `index`. `token_end`: it is the token's
// last part.
void TokenDecoder::Feed(size_t index, std::string_view text, bool token_end,
                        TokenDecoderState* state, std::string* out) const {
  if (index == steps_.size()) {
    out->append(text);
    return;
  }
  TokenDecoderState::Step& own = state->steps[index];
  switch (steps_[index].kind) {
    case Kind::kByteLevel:
      AppendByteLevelDecoded(text, &own.held);
      FeedBytes(index, false, state, out);
      break;
    case Kind::kByteFallback:
      if (const int byte = ParseByteToken(text); byte >= 0) {
        own.held.push_back(static_cast<char>(byte));
      } else {
        FlushByteRun(index, state, out);
        Feed(index + 1, text, token_end, state, out);
      }
      break;
    case Kind::kFuse:
      Feed(index + 1, text, false, state, out);
      break;
    case Kind::kStrip:
      FeedStrip(index, text, token_end, state, out);
      break;
    case Kind::kReplace:
      FeedReplace(index, text, token_end, state, out);
      break;
    case Kind::kMetaspace:
      FeedMetaspace(index, text, token_end, state, out);
      break;
    case Kind::kJoinWithSpace:
      if (own.count++ > 0) Feed(index + 1, " ", false, state, out);
      Feed(index + 1, text, token_end, state, out);
      break;
  }
}

// No more tokens come to step `index`: whatever it holds goes to the next one. Steps that join
// tokens end their one token here.
void TokenDecoder::FinishStep(size_t index, TokenDecoderState* state, std::string* out) const {
  switch (steps_[index].kind) {
    case Kind::kByteLevel:
      FeedBytes(index, true, state, out);
      break;
    case Kind::kByteFallback:
      FlushByteRun(index, state, out);
      break;
    case Kind::kFuse:
      Feed(index + 1, "", true, state, out);
      break;
    default:
      break;  // they hold nothing between tokens
  }
}

}  // namespace lockstep
