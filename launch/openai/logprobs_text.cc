#include "launch/openai/logprobs_text.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "launch/openai/json_text.h"

namespace lockstep {

namespace {

void AppendChatToken(const TokenText& text, float logprob, std::string* out) {
  *out += "{\"token\":";
  *out += text.chat_text;
  *out += ",\"logprob\":";
  AppendLogprob(logprob, out);
  *out += ",\"bytes\":";
  *out += text.bytes;
}

// {"TEXT": LOGPROB, ...} of the most probable tokens and of the one that stands there. Of tokens
// with the same text the most probable one is named.
void AppendCompletionTop(const PositionLogprobs& position, TokenTexts& texts, std::string* out) {
  std::vector<const std::string*> named;
  const auto add = [&](const TokenLogprob& token) {
    const std::string& text = texts.Get(token.id).completion_text;
    if (std::any_of(named.begin(), named.end(), [&](const auto* n) { return *n == text; })) return;
    if (!named.empty()) out->push_back(',');
    named.push_back(&text);
    *out += text;
    out->push_back(':');
    AppendLogprob(token.logprob, out);
  };
  out->push_back('{');
  for (const TokenLogprob& token : position.top) add(token);
  add(position.token);
  out->push_back('}');
}

}  // namespace

void LogprobsText::AddPrompt(std::span<const int32_t> ids,
                             std::span<const PositionLogprobs> logprobs, TokenTexts& texts) {
  for (size_t i = 0; i < ids.size(); ++i) {
    if (i == 0) {
      AddCompletion(texts.GetFirst(ids[0]), nullptr, texts);
    } else {
      AddCompletion(texts.Get(ids[i]), &logprobs[i - 1], texts);
    }
    is_first_ = false;
  }
}

void LogprobsText::Add(const PositionLogprobs& position, TokenTexts& texts) {
  const auto add = [&](const TokenText& text) {
    if (kind_ == ApiKind::kChat) {
      AddChat(text, position, texts);
    } else {
      AddCompletion(text, &position, texts);
    }
  };
  if (std::exchange(is_first_, false)) {
    add(texts.GetFirst(position.token.id));
  } else {
    add(texts.Get(position.token.id));
  }
}

void LogprobsText::AddCompletion(const TokenText& text, const PositionLogprobs* position,
                                 TokenTexts& texts) {
  for (std::string* list : {&content_, &logprobs_, &top_, &offsets_}) Separate(list);
  content_ += text.completion_text;
  absl::StrAppend(&offsets_, offset_);
  offset_ += text.num_characters;
  if (position == nullptr) {
    logprobs_ += "null";
    top_ += "null";
    return;
  }
  AppendLogprob(position->token.logprob, &logprobs_);
  AppendCompletionTop(*position, texts, &top_);
}

void LogprobsText::AddChat(const TokenText& text, const PositionLogprobs& position,
                           TokenTexts& texts) {
  Separate(&content_);
  AppendChatToken(text, position.token.logprob, &content_);
  content_ += ",\"top_logprobs\":[";
  for (size_t i = 0; i < position.top.size(); ++i) {
    if (i > 0) content_ += ',';
    AppendChatToken(texts.Get(position.top[i].id), position.top[i].logprob, &content_);
    content_ += '}';
  }
  content_ += "]}";
}

std::string LogprobsText::Take() {
  if (empty()) return "null";
  std::string json;
  const auto add = [&](const char* key, std::string& list) {
    json += json.empty() ? "{\"" : ",\"";
    json += key;
    json += "\":[";
    json += list;
    json += ']';
    list.clear();
  };
  if (kind_ == ApiKind::kChat) {
    add("content", content_);
    return json + ",\"refusal\":null}";
  }
  add("tokens", content_);
  add("token_logprobs", logprobs_);
  add("top_logprobs", top_);
  add("text_offset", offsets_);
  return json + "}";
}

std::string PromptLogprobsJson(std::span<const PositionLogprobs> logprobs, TokenTexts& texts) {
  std::string json = "[null";
  for (const PositionLogprobs& position : logprobs) {
    json += ",{";
    bool names_token = false;
    const auto add = [&](const TokenLogprob& token) {
      absl::StrAppend(&json, json.back() == '{' ? "\"" : ",\"", token.id, "\":{\"logprob\":");
      AppendLogprob(token.logprob, &json);
      json += ",\"decoded_token\":";
      json += texts.Get(token.id).chat_text;
      json += '}';
    };
    for (const TokenLogprob& token : position.top) {
      add(token);
      names_token = names_token || token.id == position.token.id;
    }
    if (!names_token) add(position.token);
    json += '}';
  }
  return json + "]";
}

}  // namespace lockstep
