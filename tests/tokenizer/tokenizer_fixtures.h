// Small vocabularies in the shape of published ones, and helpers to change them.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "model/tokenizer/pre_tokenizer.h"
#include "model/tokenizer/stream_decoder.h"
#include "model/tokenizer/tokenizer.h"
#include "runtime/core/file.h"
#include "runtime/core/json.h"

namespace lockstep {

using Ids = std::vector<int32_t>;

// tests/data/tokenizer/NAME. byte_level.json: GPT-2's alphabet and ids with a few merges.
// byte_fallback.json: the shape of Llama-2.
inline Json Fixture(const std::string& name) {
  const std::string path = std::string(LOCKSTEP_SOURCE_DIR) + "/tests/data/tokenizer/" + name;
  const auto text = ReadFile(path);
  EXPECT_TRUE(text.ok()) << text.status();
  auto json = ParseJson(*text, path);
  EXPECT_TRUE(json.ok()) << json.status();
  return *std::move(json);
}

inline std::unique_ptr<Tokenizer> Make(const Json& document) {
  auto tokenizer = Tokenizer::FromJson(document, "test.json");
  EXPECT_TRUE(tokenizer.ok()) << tokenizer.status();
  return tokenizer.ok() ? *std::move(tokenizer) : nullptr;
}

inline std::string ErrorOf(const Json& document) {
  const auto tokenizer = Tokenizer::FromJson(document, "test.json");
  EXPECT_FALSE(tokenizer.ok());
  EXPECT_EQ(tokenizer.status().code(), absl::StatusCode::kInvalidArgument);
  return std::string(tokenizer.status().message());
}

inline Ids Encode(const Tokenizer& tokenizer, std::string_view text,
                  bool add_special_tokens = false) {
  auto ids = tokenizer.Encode(text, add_special_tokens);
  EXPECT_TRUE(ids.ok()) << ids.status();
  return ids.ok() ? *ids : Ids{};
}

inline std::string Decode(const Tokenizer& tokenizer, const Ids& ids,
                          bool skip_special_tokens = false) {
  const auto text = tokenizer.Decode(ids, skip_special_tokens);
  EXPECT_TRUE(text.ok()) << text.status();
  return text.ok() ? *text : "";
}

// Adds `token` (a word of the vocabulary's own alphabet) with `id`, and the merges that build it
// from left to right.
inline void AddWord(Json* document, const std::vector<std::string>& characters, int32_t id) {
  Json& vocab = (*document)["model"]["vocab"];
  Json& merges = (*document)["model"]["merges"];
  std::string token = characters[0];
  for (size_t i = 1; i < characters.size(); ++i) {
    const std::string merge = token + " " + characters[i];
    token += characters[i];
    const int32_t next = 60000 + static_cast<int32_t>(vocab.size());
    if (!vocab.contains(token)) vocab[token] = i + 1 == characters.size() ? id : next;
    if (std::find(merges.begin(), merges.end(), Json(merge)) == merges.end())
      merges.push_back(merge);
  }
}

inline std::vector<std::string> Pieces(const PreTokenizer& pre_tokenizer, std::string_view text) {
  std::vector<std::string> pieces;
  const absl::Status status =
      pre_tokenizer.Split(text, true, [&](std::string_view piece) { pieces.emplace_back(piece); });
  EXPECT_TRUE(status.ok()) << status;
  return pieces;
}

inline std::vector<std::string> Pieces(const Json& json, std::string_view text) {
  const auto pre_tokenizer = PreTokenizer::Create(json, "test.json: pre_tokenizer");
  EXPECT_TRUE(pre_tokenizer.ok()) << pre_tokenizer.status();
  return Pieces(*pre_tokenizer, text);
}

// Patterns of published tokenizer files.
inline constexpr const char* kLlama3Pattern =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
inline constexpr const char* kQwen2Pattern =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

inline Json SplitStep(const char* pattern, const char* behavior = "Isolated", bool invert = false) {
  return {{"type", "Split"},
          {"pattern", {{"Regex", pattern}}},
          {"behavior", behavior},
          {"invert", invert}};
}
inline Json ByteLevelStep(bool use_regex) {
  return {{"type", "ByteLevel"},
          {"add_prefix_space", false},
          {"trim_offsets", true},
          {"use_regex", use_regex}};
}
inline Json Steps(const std::vector<Json>& steps) {
  return {{"type", "Sequence"}, {"pretokenizers", steps}};
}

}  // namespace lockstep
