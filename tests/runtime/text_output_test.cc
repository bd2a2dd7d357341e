#include "runtime/text_output.h"

#include <gtest/gtest.h>

#include <random>

namespace lockstep {
namespace {

struct Output {
  std::string text;
  bool stopped = false;
  size_t pieces_used = 0;
  int64_t most_held = 0;

  bool operator==(const Output&) const = default;
};

Output Feed(const std::vector<std::string>& pieces, const std::vector<std::string>& stops) {
  auto matcher = StopMatcher::Create(stops);
  EXPECT_TRUE(matcher.ok());
  Output output;
  for (const std::string& piece : pieces) {
    output.text += matcher->Push(piece);
    ++output.pieces_used;
    output.most_held = std::max(output.most_held, matcher->held_bytes());
    if (matcher->stopped()) break;
  }
  if (!matcher->stopped()) output.text += matcher->Finish();
  output.stopped = matcher->stopped();
  return output;
}

TEST(StopMatcherTest, StopAcrossPieces) {
  const Output output = Feed({"ABC", "DEF", "G", "HI", "J KL"}, {"DEFGHIJ"});
  EXPECT_EQ(output, (Output{"ABC", true, 5, 6}));
}

TEST(StopMatcherTest, WhatPassesIsReleasedAtOnce) {
  auto matcher = StopMatcher::Create({"DEFGHIJ"});
  EXPECT_EQ(matcher->Push("ABC"), "ABC");
  EXPECT_EQ(matcher->Push("xyzDE"), "xyz");
  EXPECT_EQ(matcher->Push("F"), "");
  EXPECT_EQ(matcher->Push("GHX"), "DEFGHX") << "a false start is released whole";
  EXPECT_EQ(matcher->Push("DEFGHI"), "");
  EXPECT_EQ(matcher->Finish(), "DEFGHI") << "at length the held text is flushed";
  EXPECT_FALSE(matcher->stopped());
}

TEST(StopMatcherTest, Table) {
  struct Case {
    std::vector<std::string> pieces;
    std::vector<std::string> stops;
    std::string text;
    bool stopped;
  };
  const Case cases[] = {
      {{"ABC", "DEF", "GH", "X", "end"}, {"DEFGHIJ"}, "ABCDEFGHXend", false},
      {{"one two three"}, {"two"}, "one ", true},                         // inside one piece
      {{"stop", "first"}, {"stop"}, "", true},                            // at the very start
      {{"a", "b", "c"}, {}, "abc", false},                                // no stops
      {{"hello wor", "ld and moon"}, {"moon", "world"}, "hello ", true},  // two: first in the text
      {{"the moon, the world"}, {"world", "moon"}, "the ", true},
      {{"xaab"}, {"ab", "aab"}, "x", true},  // the one that starts first
      {{"xaa", "b"}, {"ab", "aab"}, "x", true},
      {{"xbcd"}, {"c", "bcde"}, "xb", true},  // a longer one that did not come
      {{"xbcd", "e"}, {"c", "bcde"}, "x", true},
      {{"aaab"}, {"aab"}, "a", true},  // overlapping start
      {{"a", "a", "a", "b"}, {"aab"}, "a", true},
      {{"caf\u00e9 \u2192 th\u00e9"}, {"\u2192"}, "caf\u00e9 ", true},  // several bytes
      {{"\u2192\u2191"}, {"\u2193"}, "\u2192\u2191", false},  // shares its first two bytes
      {{"ab"}, {"abc"}, "ab", false},                         // ends while held
      {{"", "a", "", "b"}, {"ab"}, "", true},                 // empty pieces
      {{"xbc"}, {"c", "bcde"}, "xb", true},                   // at the end, the complete one counts
  };
  for (const Case& c : cases) {
    const Output output = Feed(c.pieces, c.stops);
    EXPECT_EQ(output.text, c.text) << c.pieces[0];
    EXPECT_EQ(output.stopped, c.stopped) << c.pieces[0];
  }
}

// What is released does not depend on the pieces, and equals the definition on the whole text.
TEST(StopMatcherTest, PiecesDoNotMatter) {
  std::mt19937 random(1);
  for (int round = 0; round < 3000; ++round) {
    std::string text;
    for (uint32_t i = random() % 30; i > 0; --i) text += static_cast<char>('a' + random() % 3);
    std::vector<std::string> stops(1 + random() % 3);
    size_t longest = 0;
    for (std::string& stop : stops) {
      for (uint32_t i = 1 + random() % 5; i > 0; --i) stop += static_cast<char>('a' + random() % 3);
      longest = std::max(longest, stop.size());
    }
    size_t first = std::string::npos;
    for (const std::string& stop : stops) first = std::min(first, text.find(stop));
    std::vector<std::string> pieces;
    for (size_t at = 0; at < text.size();) {
      pieces.push_back(text.substr(at, 1 + random() % 4));
      at += pieces.back().size();
    }
    const Output output = Feed(pieces, stops);
    EXPECT_EQ(output.text, text.substr(0, first)) << text;
    EXPECT_EQ(output.stopped, first != std::string::npos);
    EXPECT_LE(output.most_held, static_cast<int64_t>(longest) - 1);
  }
}

// Through a real detokeniser: characters of several tokens, streamed and whole.
TEST(TextOutputTest, TokensToFinalText) {
  const auto tokenizer =
      Tokenizer::Load(std::string(LOCKSTEP_SOURCE_DIR) + "/tests/data/tokenizer/byte_level.json");
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  const std::string text = "caf\u00e9 \U0001f999\U0001f999 then the end";
  const auto ids = (*tokenizer)->Encode(text, false);
  ASSERT_TRUE(ids.ok()) << ids.status();
  ASSERT_GT(ids->size(), 12u) << "characters are meant to be cut across tokens";
  const std::pair<std::string, std::string> cases[] = {
      {"\U0001f999", "caf\u00e9 "},  // a stop of one character and several tokens
      {"\U0001f999 t", "caf\u00e9 \U0001f999"},
      {"\U0001f998", text},  // shares its first bytes with what is there
      {"n the e", "caf\u00e9 \U0001f999\U0001f999 the"},
      {"end.", text}};  // held at the end, then flushed
  for (const auto& [stop, expected] : cases) {
    TextOutput output(StreamDecoder(tokenizer->get(), true), *StopMatcher::Create({stop}));
    std::string streamed;
    for (const int32_t id : *ids) {
      const std::string piece = output.Push(id);
      EXPECT_EQ(piece.find("\ufffd"), std::string::npos) << "half a character was sent";
      streamed += piece;
      if (output.stopped()) break;
    }
    if (!output.stopped()) streamed += output.Finish();
    EXPECT_EQ(streamed, expected) << stop;
    EXPECT_EQ(output.stopped(), expected != text) << stop;
  }
}

// All of `ids` through a TextOutput, which may stop.
std::pair<std::string, bool> Stream(const Tokenizer& tokenizer, const std::vector<int32_t>& ids,
                                    const std::string& stop, int64_t min_tokens) {
  TextOutput output(StreamDecoder(&tokenizer, true), *StopMatcher::Create({stop}), min_tokens);
  std::string text;
  for (const int32_t id : ids) {
    text += output.Push(id);
    if (output.stopped()) return {text, true};
  }
  text += output.Finish();
  return {text, output.stopped()};
}

// Against the definition: the first stop string that begins after the text of the first tokens.
TEST(TextOutputTest, FirstTokensAreNotSearched) {
  for (const char* file : {"byte_level.json", "byte_fallback.json"}) {
    const auto tokenizer =
        Tokenizer::Load(std::string(LOCKSTEP_SOURCE_DIR) + "/tests/data/tokenizer/" + file);
    ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
    const auto encoded = (*tokenizer)->Encode("ab\n\nab caf\u00e9\n\u2192\u2192ab\n", false);
    ASSERT_TRUE(encoded.ok()) << encoded.status();
    const std::vector<int32_t>& ids = *encoded;
    const std::string whole = *(*tokenizer)->Decode(ids, true);
    int num_stopped = 0;
    for (const std::string stop : {"ab", "b", "\n", "\n\n", "\u00e9", "\u2192", "b\n"}) {
      for (int64_t min_tokens = 0; min_tokens <= std::ssize(ids) + 1; ++min_tokens) {
        const int64_t exempt = std::min(min_tokens, std::ssize(ids));
        std::string first = *(*tokenizer)->Decode(std::span(ids).first(exempt), true);
        first.resize(std::min(first.find("\ufffd"), first.size()));  // an unfinished character
        const size_t found = whole.find(stop, first.size());
        const auto [text, stopped] = Stream(**tokenizer, ids, stop, min_tokens);
        EXPECT_EQ(text, whole.substr(0, found)) << file << ' ' << stop << ' ' << min_tokens;
        EXPECT_EQ(stopped, found != std::string::npos);
        num_stopped += stopped ? 1 : 0;
      }
    }
    EXPECT_GT(num_stopped, 10);
  }
}

TEST(StopMatcherTest, EmptyStopIsRefused) { EXPECT_FALSE(StopMatcher::Create({"a", ""}).ok()); }

}  // namespace
}  // namespace lockstep
